"""How many nodes may be lost now without losing any state."""

from megatron.core import mpu
from megatron.training import get_args
from torch import distributed as dist

from megatron_resilient.elastic.world import World
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer


def guaranteed_losses(layers: list[ReplicatedMoELayer], world: World, mirrored: bool) -> int:
    """Returns m such that any m nodes may be lost, as far as this rank's pipeline stage goes.

    Args:
        layers: the replicated layers of this rank.
        world: which node each rank is on.
        mirrored: whether shards of the distributed optimizer are kept twice.
    """
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    dense = {world.seats[rank].node for rank in dist.get_process_group_ranks(group)}
    least = len(dense) - 1
    if get_args().use_distributed_optimizer:
        least = min(least, int(mirrored))
    for layer in layers:
        ranks = dist.get_process_group_ranks(layer.ep_group)
        nodes: dict[int, set[str]] = {}
        for rank, experts in zip(ranks, layer.holding, strict=True):
            for expert in experts:
                nodes.setdefault(expert, set()).add(world.seats[rank].node)
        least = min(least, min(map(len, nodes.values())) - 1)
    return least
