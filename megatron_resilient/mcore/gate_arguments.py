"""Flags of gates and of the wire against Megatron's: what cannot be combined is refused by name."""

import argparse
from collections.abc import Iterable

from megatron_resilient.config import GateConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.refusals import Refusal, is_set, listed, other_than, refuse


def _positive(value: float | Iterable[float] | None) -> bool:
    given = value if isinstance(value, list | tuple) else (value,)
    return any((each or 0) > 0 for each in given)


# (attribute, is it in the way?, why)
_OF_EVERY_GATE: tuple[Refusal, ...] = (
    ("moe_router_fusion", bool, "the fused kernel knows Megatron's formulas only"),
    ("moe_router_num_groups", is_set, "gates choose among all experts"),
    ("moe_router_group_topk", is_set, "gates choose among all experts"),
    ("moe_router_enable_expert_bias", bool, "the bias would change the gate's choice"),
    ("moe_router_topk_scaling_factor", is_set, "weights are those of the gate's formula"),
    ("moe_router_score_function", other_than("softmax"), "the gate has a formula of its own"),
    (
        "moe_router_load_balancing_type",
        lambda v: any(kind in ("sinkhorn", "quantile_balancing") for kind in listed(v)),
        "it is a choice of its own; use aux_loss, seq_aux_loss or none",
    ),
    ("moe_enable_routing_replay", bool, "it replays choices of Megatron's router only"),
    ("moe_use_upcycling", bool, "upcycling makes Megatron's router; start from its checkpoint"),
    ("use_megatron_fsdp", bool, "it knows the parameters of Megatron's router only"),
    ("use_torch_fsdp2", bool, "it knows the parameters of Megatron's router only"),
    ("init_model_with_meta_device", bool, "the gate's weights are drawn when it is built"),
    ("cuda_graph_impl", other_than("none"), "gates have not been tried in a graph"),
    (
        "transformer_impl",
        lambda v: v == "inference_optimized",
        "it has a router of its own",
    ),
)
_OF_GSHARD: tuple[Refusal, ...] = (
    ("moe_router_pre_softmax", bool, "GShard's softmax is over the experts that were kept"),
    ("moe_router_topk", lambda v: v == 1, "the softmax over one expert is 1: nothing to learn"),
)
_OF_LOOKAHEAD: tuple[Refusal, ...] = (
    ("moe_aux_loss_coeff", _positive, "all experts have the same load already; pass 0"),
    ("moe_expert_capacity_factor", is_set, "the gate itself says how much an expert gets"),
    ("moe_pad_expert_input_to_capacity", bool, "all experts have the same load already"),
    ("moe_router_padding_for_quantization", bool, "padding is made of tokens that were not chosen"),
    ("moe_router_force_load_balancing", bool, "all experts have the same load already"),
    ("moe_router_force_biased", is_set, "all experts have the same load anyway"),
    (
        "moe_token_dispatcher_type",
        lambda v: v == "flex",
        "it wants the same number of experts for every token; use alltoall or allgather",
    ),
    (
        "context_parallel_size",
        other_than(1),
        "a sequence cut over context-parallel ranks is not put together for the gate",
    ),
)
_OF_SOFT: tuple[Refusal, ...] = (
    ("moe_z_loss_coeff", is_set, "nothing is chosen by the logits that it would keep small"),
    ("moe_shared_expert_overlap", bool, "the dispatcher would add tokens to mixtures"),
    (
        "overlap_moe_expert_parallel_comm",
        bool,
        "what the mixtures are combined by does not pass from one part of a layer to the next",
    ),
)
_OF_WIRE: tuple[Refusal, ...] = (
    (
        "moe_token_dispatcher_type",
        lambda v: v != "alltoall",
        "gradients or outputs would be added up in the narrow type; use alltoall",
    ),
    ("cuda_graph_impl", other_than("none"), "hooks have not been tried in a graph"),
    ("moe_latent_size", is_set, "what travels is narrow already and was not tried"),
)


def check(args: argparse.Namespace, config: GateConfig) -> None:
    """Checks that a run can have the gate and the wire that it asks for. Nothing is built yet.

    Raises:
        ConfigError: names the flag and what to do.
    """
    _check_unused(config)
    if config.gate != "megatron":
        _check_gate(args, config)
    if config.wire_dtype != "model":
        _check_wire(args, config.wire_dtype)


def _check_unused(config: GateConfig) -> None:
    """Refuses a flag of a gate that is not there: it would be ignored."""
    default = GateConfig()
    for name, gate in (
        ("gate_dimensions", "xmoe"),
        ("gate_temperature", "xmoe"),
        ("gate_mixtures", "soft"),
    ):
        value = getattr(config, name)
        if value != getattr(default, name) and config.gate != gate:
            raise ConfigError(
                f"--resilient-{name.replace('_', '-')} {value}: it belongs to --resilient-gate "
                f"{gate}, and the gate is {config.gate}"
            )


def _check_gate(args: argparse.Namespace, config: GateConfig) -> None:
    flag = f"--resilient-gate {config.gate}"
    if not args.num_experts:
        raise ConfigError(f"{flag}: the model has no experts; pass --num-experts")
    refuse(args, flag, _OF_EVERY_GATE)
    if config.gate == "gshard":
        refuse(args, flag, _OF_GSHARD)
    if config.gate not in ("expert-choice", "soft"):
        return
    if not config.allow_lookahead_gates:
        raise ConfigError(
            f"{flag}: what a token gets depends on later tokens of its sequence, so that a causal "
            "language model is trained on what it is to predict, and cannot generate word by word "
            "what it learned; for another kind of model, or to insist, add "
            "--resilient-allow-lookahead-gates"
        )
    refuse(args, flag, _OF_LOOKAHEAD)
    if config.gate == "soft":
        refuse(args, flag, _OF_SOFT)
        _check_mixtures(args, config, flag)


def _check_mixtures(args: argparse.Namespace, config: GateConfig, flag: str) -> None:
    from megatron_resilient.mcore.gates.build import mixtures_per_expert

    tensor_parallel = args.tensor_model_parallel_size
    if args.seq_length is None:  # Megatron refuses that itself
        return
    each = mixtures_per_expert(config, args.seq_length, args.num_experts, args.moe_router_topk)
    if each * args.num_experts % tensor_parallel:
        raise ConfigError(
            f"{flag}: {args.num_experts} experts x {each} mixtures cannot be shared out among "
            f"--tensor-model-parallel-size {tensor_parallel} ranks; pass --resilient-gate-mixtures "
            f"{-(-each // tensor_parallel) * tensor_parallel}"
        )


def _check_wire(args: argparse.Namespace, dtype: str) -> None:
    flag = f"--resilient-wire-dtype {dtype}"
    if not args.num_experts:
        raise ConfigError(f"{flag}: the model has no experts; pass --num-experts")
    if dtype == "bf16" and (args.bf16 or args.fp16):
        raise ConfigError(f"{flag}: tokens have two bytes already; drop one of the flags")
    if dtype == "fp8" and args.hidden_size % 2:
        raise ConfigError(f"{flag}: --hidden-size {args.hidden_size} must be even")
    refuse(args, flag, _OF_WIRE)
