"""Flags of overlap and dispatch against Megatron's: what cannot be combined is refused by name."""

import argparse
import os

from megatron_resilient.comm.node_groups import cut, read_node_map
from megatron_resilient.config import GateConfig, OverlapConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.refusals import Refusal, listed, other_than, refuse

_BELONGS_TO = {
    "fixed": ("overlap_degrees", "overlap_order"),
    "auto": ("overlap_max_degree", "overlap_interval", "overlap_profiles"),
}
_LATE = "gradients of weights are to come after those of inputs, and chunks need both at once"
_REFUSED: tuple[Refusal, ...] = (
    (
        "moe_token_dispatcher_type",
        other_than("alltoall"),
        "chunks are sent by an all-to-all of counted rows; use alltoall",
    ),
    ("moe_pad_expert_input_to_capacity", bool, "chunks are uneven, and nothing is padded"),
    ("moe_router_padding_for_quantization", bool, "chunks are uneven, and nothing is padded"),
    ("moe_router_padding_for_fp8", bool, "chunks are uneven, and nothing is padded"),
    ("fp8", bool, "scales would be those of chunks, not of a layer's tokens"),
    ("fp4", bool, "scales would be those of chunks, not of a layer's tokens"),
    (
        "gradient_accumulation_fusion",
        bool,
        "gradients of experts are added up over chunks first; pass "
        "--no-gradient-accumulation-fusion",
    ),
    ("overlap_moe_expert_parallel_comm", bool, "it is another overlap of the same communication"),
    ("delay_wgrad_compute", bool, _LATE),
    ("overlap_dispatch_backward_with_experts_wgrad", bool, _LATE),
    (
        "moe_shared_expert_overlap",
        bool,
        "the dispatcher that would compute them is not called; shared experts without it work",
    ),
    ("cuda_graph_impl", other_than("none"), "sizes of chunks change in every microbatch"),
    ("enable_cuda_graph", bool, "sizes of chunks change in every microbatch"),
    ("external_cuda_graph", bool, "sizes of chunks change in every microbatch"),
    ("use_megatron_fsdp", bool, "it gathers and drops weights around one call of the experts"),
    ("use_torch_fsdp2", bool, "it gathers and drops weights around one call of the experts"),
    ("expert_gtp_weight_remat_size", lambda v: (v or 1) > 1, "gradients of weights are sharded"),
    ("gtp_weight_remat_size", lambda v: (v or 1) > 1, "gradients of weights are sharded"),
    ("cpu_offloading_num_layers", bool, "what chunks keep for the backward pass was not tried"),
    (
        "offload_modules",
        lambda v: any(name in ("expert_fc1", "moe_act") for name in listed(v)),
        "what chunks keep for the backward pass was not tried",
    ),
    ("transformer_impl", lambda v: v == "inference_optimized", "it has a dispatcher of its own"),
)


def check(
    args: argparse.Namespace, config: OverlapConfig, gates: GateConfig, elastic: bool
) -> None:
    """Checks that a run can have the overlap and the dispatch that it asks for. Nothing is built.

    Raises:
        ConfigError: names the flag and what to do.
    """
    flag = asked_for(config)
    _check_unused(config)
    if flag is None:
        return
    if not args.num_experts:
        raise ConfigError(f"{flag}: the model has no experts; pass --num-experts")
    refuse(args, flag, _REFUSED)
    selective = args.recompute_granularity == "selective"
    if selective and "moe_act" in (args.recompute_modules or ()):
        raise ConfigError(
            f"--recompute-modules moe_act with {flag}: it cannot compute again inside a chunk; use "
            "moe"
        )
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if gates.wire_dtype != "model" and expert_tp > 1:
        raise ConfigError(
            f"--resilient-wire-dtype {gates.wire_dtype} with {flag} and expert tensor parallelism "
            f"of {expert_tp}: outputs would be added up in the narrow type; pass "
            "--expert-tensor-parallel-size 1"
        )
    if config.dispatch != "direct" and not elastic:  # there the coordinator says who is where
        _check_nodes(config.dispatch)


def asked_for(config: OverlapConfig) -> str | None:
    """Returns the flag by which MoE layers send in our way; None if Megatron's is to be used."""
    if config.overlap != "off":
        return f"--resilient-overlap {config.overlap}"
    return None if config.dispatch == "direct" else f"--resilient-dispatch {config.dispatch}"


def _check_unused(config: OverlapConfig) -> None:
    default = OverlapConfig()
    for overlap, names in _BELONGS_TO.items():
        for name in names if config.overlap != overlap else ():
            value = getattr(config, name)
            if value != getattr(default, name):
                said = " ".join(map(str, listed(value)))
                raise ConfigError(
                    f"--resilient-{name.replace('_', '-')} {said}: it belongs to "
                    f"--resilient-overlap {overlap}"
                )


def _check_nodes(dispatch: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = sorted({len(ranks) for ranks in cut(read_node_map(world))})
    if dispatch == "2d" and len(sizes) > 1:
        raise ConfigError(
            f"--resilient-dispatch 2d: nodes have {' and '.join(map(str, sizes))} ranks, and it "
            "wants as many on each; use 1d"
        )
