"""What gradient slices do not go together with, by the names of flags."""

from typing import Any

# (attribute, is it in the way?, why). Of Megatron's DistributedDataParallelConfig:
_OF_DDP = (
    (
        "overlap_grad_reduce",
        bool,
        "Megatron then reduces whole buckets during the backward pass itself: use one of the two",
    ),
    (
        "num_distributed_optimizer_instances",
        lambda v: v > 1,
        "gradients are reduced in two groups one after the other",
    ),
    (
        "reduce_scatter_with_fp32_accumulation",
        bool,
        "it has a collective of its own, which takes whole buckets",
    ),
    (
        "param_name_patterns_for_fp32_local_accumulation",
        bool,
        "gradients come into the buffer when it is reduced",
    ),
)
# Of Megatron's TransformerConfig: what changes when a gradient is final.
_OF_MODEL = (
    ("delay_wgrad_compute", bool, "gradients of weights come after those of inputs"),
    ("defer_embedding_wgrad_compute", bool, "the output layer's gradient comes at the end"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "gradients of weights come after those of inputs",
    ),
    ("overlap_moe_expert_parallel_comm", bool, "its schedule runs layers in pieces"),
    ("mtp_num_layers", bool, "its layers use the embedding and the output layer too"),
    ("gtp_weight_remat_size", lambda v: v > 1, "gradients of weights are sharded"),
    ("expert_gtp_weight_remat_size", lambda v: v > 1, "gradients of weights are sharded"),
    ("mlp_chunks_for_training", lambda v: v > 1, "a layer runs several times a microbatch"),
    ("hybrid_context_parallel", bool, "the data say how many microbatches there are"),
    ("cuda_graph_impl", lambda v: v not in (None, "none"), "a graph's replay calls no windows"),
)


def why_not(model_config: Any, ddp_config: Any) -> str | None:
    """Says which flag is in the way of gradient slices, and why; None: none is.

    Pure; the same on all ranks.

    Args:
        model_config: Megatron's TransformerConfig.
        ddp_config: Megatron's DistributedDataParallelConfig.
    """
    for config, table in ((ddp_config, _OF_DDP), (model_config, _OF_MODEL)):
        for name, in_the_way, why in table:
            if in_the_way(getattr(config, name)):
                return f"--{name.replace('_', '-')}: {why}"
    return None
