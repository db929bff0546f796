"""megatron.core.tensor_parallel.random: one generator plays both the CPU's and the GPU's."""

import contextlib
import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _fork(original):
    import logging

    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    @contextlib.contextmanager
    @functools.wraps(original)
    def fork(self, *args, **kwargs):
        # The warning that the CPU's state changed comes when the context ends; here it is always
        # true and always meant.
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, logger, "disabled", logger.disabled)
            stack.enter_context(original(self, *args, **kwargs))
            stack.callback(setattr, logger, "disabled", True)
            yield

    return fork


PATCHES = (
    Patch(
        id="cpu.rng-fork-warning",
        group="cpu",
        target="megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        kind="wrap",
        make=_fork,
        reason="It warns at every dropout that the CPU's generator moved inside the GPU's context.",
        no_seam="A logging filter would stay behind after `disable()`.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="The tracker compares generators of the device that it forks.",
    ),
)
