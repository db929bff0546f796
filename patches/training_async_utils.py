"""megatron.training.async_utils: asynchronous saves by a forked writer where there is no CUDA.

A CUDA process must not fork a child that touches the GPU, so Megatron spawns its writer. Spawned,
it lacks the CPU backend, dies at its first torch.cuda call, and training waits for it for ever.
Without CUDA a fork is safe, and cheap: memory is copied on write.
"""

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _init_persistent_async_worker(original):
    def init_persistent_async_worker(rank, mp_mode="spawn"):
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.training import async_utils

        async_utils._async_calls_queue = AsyncCallsQueue(persistent=False)

    return init_persistent_async_worker


PATCHES = (
    Patch(
        id="cpu.async-save-worker",
        group="cpu",
        target="megatron.training.async_utils:init_persistent_async_worker",
        kind="replace",
        make=_init_persistent_async_worker,
        reason="The spawned writer dies on the CPU and --async-save hangs without a word.",
        no_seam="pretrain() accepts the persistent worker only, and hard-codes how it starts.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=("megatron.training.initialize:init_persistent_async_worker",),
        removable_when="--async-save works without --use-persistent-ckpt-worker.",
    ),
)
