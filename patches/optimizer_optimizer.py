"""megatron.core.optimizer.optimizer: resuming with another number of chained optimizers."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _load_state_dict(original):
    @functools.wraps(original)
    def load_state_dict(self, state_dict):
        from megatron_resilient.mcore import optimizer_layout

        optimizer_layout.load(original, self, state_dict)

    return load_state_dict


PATCHES = (
    Patch(
        id="fixes.optimizer-layout",
        group="fixes",
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        kind="wrap",
        make=_load_state_dict,
        reason="A checkpoint written with EP > 1 cannot be loaded with EP = 1, nor the other way "
        "round: KeyError 'optimizer', no parameter group found, or a wrong number of entries.",
        no_seam="The optimizer is chained inside get_megatron_optimizer.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="The common part of an optimizer state does not depend on EP.",
    ),
)
