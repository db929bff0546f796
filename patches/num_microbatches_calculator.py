"""megatron.core.num_microbatches_calculator: a batch that the ranks do not divide."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _build_num_microbatches_calculator(original):
    @functools.wraps(original)
    def build_num_microbatches_calculator(*args, **kwargs):
        from megatron_resilient.mcore import uneven

        return uneven.calculator(original, *args, **kwargs)

    return build_num_microbatches_calculator


PATCHES = (
    Patch(
        id="core.num-microbatches",
        group="core",
        target="megatron.core.num_microbatches_calculator:_build_num_microbatches_calculator",
        kind="wrap",
        make=_build_num_microbatches_calculator,
        reason="After the loss of a node the data-parallel size need not divide the global batch; "
        "Megatron asserts that it does. Where it does, Megatron's calculator is returned.",
        no_seam="The only choice is --decrease-batch-size-if-needed: training on another batch.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="The last microbatches of a step may be empty.",
    ),
)
