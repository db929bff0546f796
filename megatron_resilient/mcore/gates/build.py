"""Which router a layer gets: the flag `--resilient-gate` against Megatron's classes."""

from functools import partial
from typing import Any

from megatron_resilient.config import GateConfig


def router_builder(config: GateConfig, sequence: int, experts: int, topk: int) -> Any:
    """Returns what builds a layer's router, None for Megatron's own.

    Args:
        config: the flags.
        sequence: tokens of a sequence.
        experts: logical experts of a layer.
        topk: `moe_router_topk`.
    """
    from megatron_resilient.mcore.gates import routers
    from megatron_resilient.mcore.gates.expert_choice_router import ExpertChoiceRouter
    from megatron_resilient.mcore.gates.soft_router import SoftRouter

    match config.gate:
        case "megatron":
            return None
        case "gshard":
            return routers.GShardRouter
        case "sigmoid":
            return routers.SigmoidRouter
        case "xmoe":
            return partial(
                routers.XMoERouter,
                dimensions=config.gate_dimensions or max(2, experts // 2),
                temperature=config.gate_temperature,
            )
        case "expert-choice":
            return ExpertChoiceRouter
        case "soft":
            mixtures = mixtures_per_expert(config, sequence, experts, topk)
            return partial(SoftRouter, mixtures_per_expert=mixtures)
    raise AssertionError(config.gate)


def mixtures_per_expert(config: GateConfig, sequence: int, experts: int, topk: int) -> int:
    """Returns the mixtures of one expert and sequence; by default as many as top-k has tokens."""
    return config.gate_mixtures or max(1, sequence * topk // experts)
