"""megatron.core.distributed.param_and_grad_buffer: gradients that are sent before the end."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _start_grad_sync(original):
    @functools.wraps(original)
    def start_grad_sync(self, force_all_reduce=False):
        slices = getattr(self, "gradient_slices", None)  # mcore/overlap/gradient_slices.py
        if slices is None or not slices.finish(self):
            original(self, force_all_reduce=force_all_reduce)

    return start_grad_sync


PATCHES = (
    Patch(
        id="core.start-grad-sync",
        group="core",
        target="megatron.core.distributed.param_and_grad_buffer"
        ":_ParamAndGradBucketGroup.start_grad_sync",
        kind="wrap",
        make=_start_grad_sync,
        reason="Slices of the dense gradients are summed while the backward pass runs; at its end "
        "only the rest of a bucket may be. Without slices it is Megatron's function.",
        no_seam="A bucket is reduced as a whole; finalize_model_grads_func comes around all "
        "reductions, and can leave none out.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="A bucket group can be told which of its elements are reduced already.",
    ),
)
