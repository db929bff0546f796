"""The replicated MoE layers of a model: how they are built and found."""

import os
from collections.abc import Sequence
from math import gcd
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args
from torch import nn

from megatron_resilient.algorithms.rank_plan import plan_layers
from megatron_resilient.comm.transfer import Holding
from megatron_resilient.config import config_from_args
from megatron_resilient.mcore.layer_hooks import LayerHooks
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.overlap.setup import make_overlap
from megatron_resilient.mcore.parted_layer import PartedMoELayer


def ranks_per_node(ranks: int) -> int:
    """Returns how many consecutive ranks of an expert-parallel domain of `ranks` fail together."""
    args = get_args()
    asked = config_from_args(args).replicas.ranks_per_node
    together = asked or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return gcd(ranks, max(1, together // (args.expert_tensor_parallel_size or 1)))


def plan(loads: Sequence[Sequence[int]], ranks: int) -> list[Holding]:
    """Plans holdings of an expert-parallel domain for the loads of its layers.

    Args:
        loads: tokens of every logical expert, layer by layer.
        ranks: expert-parallel ranks.
    """
    config = config_from_args(get_args()).replicas
    return plan_layers(
        loads, ranks, ranks_per_node(ranks), config.slots_per_rank, config.min_replicas
    )


def parted_layer(*args: Any, **kwargs: Any) -> PartedMoELayer:
    """Builds an MoE layer without replicas, with an overlap of its own if the flags ask for one."""
    overlap = make_overlap(config_from_args(get_args()).overlap)
    return PartedMoELayer(*args, overlap=overlap, **kwargs)


def moe_layer(
    *args: Any, hooks: tuple[LayerHooks, ...], is_mtp_layer: bool = False, **kwargs: Any
) -> MoELayer:
    """Builds an MoE layer with the replicas that the flags ask for; takes MoELayer's arguments.

    Layers of multi-token prediction have none: they are counted apart and seldom hot.
    """
    if is_mtp_layer:
        return parted_layer(*args, is_mtp_layer=True, hooks=hooks, **kwargs)
    ours = config_from_args(get_args())
    config = kwargs.get("config", args[0] if args else None)
    even = [[1] * config.num_moe_experts]
    return ReplicatedMoELayer(
        *args,
        is_mtp_layer=False,
        hooks=hooks,
        overlap=make_overlap(ours.overlap),
        **kwargs,
        slots_per_rank=ours.replicas.slots_per_rank,
        first_holding=plan(even, config.expert_model_parallel_size)[0],
    )


def replicated_layers(model: list[nn.Module]) -> list[ReplicatedMoELayer]:
    """Returns this rank's replicated layers by layer number."""
    layers = [
        module
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, ReplicatedMoELayer)
    ]
    return sorted(layers, key=lambda layer: layer.layer_number)
