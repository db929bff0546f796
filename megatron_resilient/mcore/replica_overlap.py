"""Whether gradients of replicas can be summed while the backward pass runs, and if not, why."""

from typing import Any

# (attribute of Megatron's TransformerConfig, is it in the way?, why)
_LATE = (
    ("calculate_per_token_loss", bool, "gradients are divided by the tokens of the step before"),
    ("overlap_moe_expert_parallel_comm", bool, "its schedule runs layers in pieces"),
    ("delay_wgrad_compute", bool, "gradients of weights come after those of inputs"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "gradients of weights come after those of inputs",
    ),
    ("expert_gtp_weight_remat_size", lambda v: v > 1, "gradients of weights are sharded"),
    ("gtp_weight_remat_size", lambda v: v > 1, "gradients of weights are sharded"),
    ("mlp_chunks_for_training", lambda v: v > 1, "a layer runs several times a microbatch"),
    ("hybrid_context_parallel", bool, "the data say how many microbatches there are"),
)


def why_late(model_config: Any, ddp_config: Any, expert_domains: int) -> str | None:
    """Says why replicas can be summed only after the backward pass; None: during it.

    Pure; the same on all ranks.

    Args:
        model_config: Megatron's TransformerConfig.
        ddp_config: Megatron's DistributedDataParallelConfig.
        expert_domains: expert-data-parallel size.
    """
    if expert_domains > 1:
        return "gradients are summed over expert-parallel domains before"
    if ddp_config.param_name_patterns_for_fp32_local_accumulation:
        return "gradients are rounded before"
    for name, in_the_way, why in _LATE:
        if in_the_way(getattr(model_config, name)):
            return f"{name}: {why}"
    return None
