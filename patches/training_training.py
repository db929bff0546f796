"""megatron.training.training: where the plugin stands in Megatron's training loop."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _hooked(name: str):
    """Returns a `make` that routes a call through `train_hooks.<name>`."""

    def make(original):
        @functools.wraps(original)
        def hooked(*args, **kwargs):
            from megatron_resilient.mcore import train_hooks

            return getattr(train_hooks, name)(original, *args, **kwargs)

        return hooked

    return make


def _core(name: str, target: str, hook: str, reason: str, no_seam: str, bound_in=(), after=()):
    return Patch(
        id=f"core.{name}",
        group="core",
        target=target,
        kind="wrap",
        make=_hooked(hook),
        reason=reason,
        no_seam=no_seam,
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=bound_in,
        after=after,
        removable_when="pretrain() offers callbacks at these points.",
    )


PATCHES = (
    _core(
        "setup-model-and-optimizer",
        "megatron.training.training:setup_model_and_optimizer",
        "setup",
        "The model is built here and training has not begun: ranks compare their patches, and "
        "the run's record and the expert load counters are attached.",
        "pretrain() has no hook between building the model and training it.",
    ),
    _core(
        "train-step",
        "megatron.training.training:train_step",
        "train_step",
        "Loss, speed and expert loads of every step go into the run's record.",
        "train() has no per-step hook.",
    ),
    _core(
        "evaluate",
        "megatron.training.training:evaluate",
        "evaluate",
        "Losses on the validation and the test set go into the run's record.",
        "evaluate has no hook; its losses go to the log and to TensorBoard only.",
    ),
    _core(
        "save-checkpoint",
        "megatron.training.checkpointing:save_checkpoint",
        "save_checkpoint",
        "How long training stands still for a checkpoint goes into the run's record.",
        "save_checkpoint has no hook.",
        bound_in=("megatron.training.training:save_checkpoint",),
    ),
    _core(
        "finalize-async-save",
        "megatron.training.async_utils:maybe_finalize_async_save",
        "finalize_async_save",
        "When an asynchronous save is complete goes into the run's record.",
        "Finalization callbacks are added inside save_checkpoint.",
        bound_in=("megatron.training.training:maybe_finalize_async_save",),
    ),
    _core(
        "load-checkpoint",
        "megatron.training.checkpointing:load_checkpoint",
        "load_checkpoint",
        "A checkpoint that does not fit ends in a traceback per rank; here, in one line.",
        "load_checkpoint has no hook.",
        bound_in=("megatron.training.training:load_checkpoint",),
        after=("fixes.load-checkpoint",),
    ),
)
