"""Layer specs: puts replicated MoE layers where a spec has Megatron's."""

from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args

from megatron_resilient.config import config_from_args


def replicated(mlp: Any) -> Any:
    """Returns the MLP builder of a layer spec with replicas, if the flags ask for them.

    Args:
        mlp: `spec.submodules.mlp`: a partial of MoELayer; anything else is returned as it is.
    """
    from megatron_resilient.mcore.replicas import moe_layer

    is_stock = isinstance(mlp, partial) and mlp.func is MoELayer
    if not is_stock or not config_from_args(get_args()).replicas.slots_per_rank:
        return mlp
    return partial(moe_layer, *mlp.args, **mlp.keywords)
