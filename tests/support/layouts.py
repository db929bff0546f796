"""Flags of layouts that many tests train in; they join with `|`. See `pretrain_pool.TINY`."""

EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
TP2 = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_tensor_parallel_size": 1,
}
ETP2 = TP2 | {"expert_tensor_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
# Two chunks of one layer each on both stages.
VPP2 = PP2 | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
DISTOPT = {"use_distributed_optimizer": True}
DISTOPT_OVERLAPPED = DISTOPT | {"overlap_grad_reduce": True, "overlap_param_gather": True}
RESHARDABLE = DISTOPT | {"dist_ckpt_optim_fully_reshardable": True}
# Moves experts every five steps whether it pays or not, and compares replicas bit by bit.
MOVING_REPLICAS = {
    "resilient_slots_per_rank": 4,
    "resilient_ranks_per_node": 1,
    "resilient_rebalance_interval": 5,
    "resilient_rebalance_threshold": 0,
    "resilient_check_replicas_interval": 5,
}
