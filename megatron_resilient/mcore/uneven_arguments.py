"""Flags of a world that does not fit its batch: what cannot be exact there is refused by name."""

import argparse
import os
from collections.abc import Iterable
from typing import Any

from megatron_resilient.algorithms.microbatches import Microbatches
from megatron_resilient.errors import ConfigError


def _balances_by(*kinds: str) -> Any:
    def has(value: str | Iterable[str] | None) -> bool:
        given = [value] if isinstance(value, str) else value or ()
        return any(kind in given for kind in kinds)

    return has


# (attribute, is it in the way?, why)
_REFUSED = (
    (
        "step_batch_size_schedule",
        lambda v: v is not None,
        "only a constant --global-batch-size can be cut anew",
    ),
    (
        "dataloader_type",
        lambda v: v not in (None, "single"),
        "the order of samples would depend on the data-parallel size; use single",
    ),
    ("hybrid_context_parallel", bool, "a sample would be on several data-parallel ranks"),
    ("iterations_to_skip", bool, "Megatron would count samples of empty microbatches as consumed"),
    ("full_validation", bool, "ranks get different numbers of samples; use --eval-iters"),
    ("sft", bool, "its validation loss is a mean over all microbatches, empty ones included"),
    ("perform_rl_step", bool, "rollouts are shared out among the ranks by Megatron"),
    (
        "moe_router_load_balancing_type",
        _balances_by("global_aux_loss"),
        "this loss is taken over one microbatch of each data-parallel rank, so that it is another "
        "in every world; use aux_loss or seq_aux_loss",
    ),
    (
        "moe_router_load_balancing_type",
        _balances_by("quantile_balancing"),
        "it averages over ranks, not over microbatches; use aux_loss or --moe-router-enable-"
        "expert-bias",
    ),
    (
        "moe_token_dispatcher_type",
        lambda v: v == "flex",
        "an empty microbatch sends no token, for which it has no form; use alltoall or allgather",
    ),
    (
        "moe_pad_expert_input_to_capacity",
        bool,
        "an empty microbatch sends no token, and no padding for one",
    ),
    ("moe_expert_rank_capacity_factor", lambda v: v is not None, "it may run microbatches again"),
    ("moe_enable_routing_replay", bool, "an empty microbatch has no routing"),
    (
        "cuda_graph_impl",
        lambda v: v not in (None, "none"),
        "a graph cannot tell microbatches apart",
    ),
    ("experimental_attention_variant", lambda v: v is not None, "its loss cannot be weighed"),
    ("qk_clip", bool, "logits of empty microbatches would clip the weights"),
    (
        "tensor_parallel_num_weight_shards",
        lambda v: (v or 1) > 1,
        "it shares microbatches among more than the data-parallel ranks",
    ),
)


def data_parallel(args: argparse.Namespace) -> int:
    """Returns the data-parallel size of this world."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world // (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def interleaving(args: argparse.Namespace) -> tuple[int, int]:
    """Returns (stages, group) of an interleaved pipeline schedule, (1, 1) for any other.

    `pipeline_model_parallel_layout` is understood after Megatron's validation only.
    """
    flags = (
        "virtual_pipeline_model_parallel_size",  # set by the validation
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    stages = args.pipeline_model_parallel_size
    if stages == 1 or all(getattr(args, flag, None) is None for flag in flags):
        return 1, 1
    return stages, getattr(args, "microbatch_group_size_per_vp_stage", None) or stages


def training_layout(args: argparse.Namespace) -> Microbatches | None:
    """Returns how a training step is cut, None where Megatron decides on the batch."""
    batch, micro = args.global_batch_size, args.micro_batch_size
    if batch is None or micro is None or args.decrease_batch_size_if_needed:
        return None
    return Microbatches(batch, micro, data_parallel(args), *interleaving(args))


def evaluation_layout(args: argparse.Namespace) -> Microbatches | None:
    """Returns how a step of an evaluation is cut, None where Megatron decides on the batch."""
    batch = args.eval_global_batch_size or args.global_batch_size
    micro = args.eval_micro_batch_size or args.micro_batch_size
    if batch is None or micro is None:
        return None
    return Microbatches(batch, micro, data_parallel(args), *interleaving(args))


def check(args: argparse.Namespace, elastic: bool) -> None:
    """Checks that training and evaluation are exact in this world.

    Args:
        args: parsed flags, before Megatron's validation.
        elastic: whether the world may change, so that any may come.

    Raises:
        ConfigError: names the flag and what to do.
    """
    layouts = [
        (training_layout(args), "--global-batch-size", "--micro-batch-size"),
        (evaluation_layout(args), "--eval-global-batch-size", "--eval-micro-batch-size"),
    ]
    why = "an elastic run" if elastic else ""
    for layout, batch, micro in layouts:
        if layout is None or (layout.fits and layout.batch % layout.micro == 0):
            continue
        if layout.batch % layout.micro:
            raise ConfigError(
                f"{batch} {layout.batch}: must be a multiple of {micro} {layout.micro}"
            )
        why = why or f"{batch} {layout.batch} on {layout.ranks} data-parallel ranks"
    if not why:
        return
    for name, in_the_way, reason in _REFUSED:
        value = getattr(args, name, None)
        if in_the_way(value):
            raise ConfigError(f"--{name.replace('_', '-')} {_spelled(value)} with {why}: {reason}")
    if getattr(args, "mtp_num_layers", None) and getattr(
        args, "overlap_moe_expert_parallel_comm", False
    ):
        raise ConfigError(
            f"--overlap-moe-expert-parallel-comm with --mtp-num-layers and {why}: losses of "
            "multi-token prediction cannot be weighed; drop one of the flags"
        )


def pad_evaluation(args: argparse.Namespace) -> int | None:
    """Makes Megatron's validation accept an evaluation that does not fit.

    Returns:
        The batch to put back after the validation; None if nothing was changed.
    """
    layout = evaluation_layout(args)
    if layout is None or layout.fits:
        return None
    args.eval_global_batch_size = layout.padded_batch
    return layout.batch


def _spelled(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
