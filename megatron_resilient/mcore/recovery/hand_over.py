"""What only some ranks hold goes to others: before a departure, and where ranks have no seat."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_resilient import plugin
from megatron_resilient.algorithms.refill_plan import Piece, orphans, plan_refill
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.pieces import exchange
from megatron_resilient.elastic.graveyard import retire
from megatron_resilient.elastic.member import Member
from megatron_resilient.elastic.world import World
from megatron_resilient.mcore.recovery.arrays import Arrays


def before_departure(member: Member, own: Arrays) -> tuple[Arrays, set[str]] | None:
    """Hands over what only the leaving nodes hold. Collective over all ranks, between two steps.

    Args:
        member: says which nodes leave.
        own: all state of this rank.

    Returns:
        (what this rank inherits, the nodes that leave: all that any rank was told of); None if all
        nodes leave, so that nobody could inherit.
    """
    told = gather_json({"node": member.node, "leaving": sorted(member.leaving())})
    leaving_nodes = {node for each in told for node in each["leaving"]}
    leaving = [each["node"] in leaving_nodes for each in told]
    if all(leaving):
        return None
    return hand_over(own, leaving, [each["node"] for each in told]), leaving_nodes


def from_donors(world: World, own: Arrays) -> Arrays:
    """Takes over, before a world begins, what only processes without a seat in it hold.

    Collective over seats and donors, in a process group for this alone.

    Args:
        world: with at least one donor.
        own: all state of this process.

    Returns:
        What this process inherits.
    """
    there = world.everybody
    store = dist.TCPStore(world.store_host, world.store_port, is_master=False)
    dist.init_process_group(
        "gloo" if plugin.on_cpu() else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("donors", store),
        rank=world.rank,
        world_size=len(there),
    )
    try:
        leaving = [rank >= len(world.seats) for rank in range(len(there))]
        return hand_over(own, leaving, [seat.node for seat in there])
    finally:
        groups = list(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        retire(groups.clear)


def hand_over(own: Arrays, leaving: list[bool], nodes: list[str]) -> Arrays:
    """Gives what only leaving ranks hold to those that stay. Collective over all ranks.

    Args:
        own: all state of this rank.
        leaving: whether a rank leaves, by rank; one at least stays.
        nodes: node of every rank.

    Returns:
        What this rank inherits, in memory of its own.
    """
    held = [[Piece(*piece) for piece in each] for each in gather_json(own.pieces())]
    taken = orphans(held, dict(enumerate(leaving)))
    heritage = Arrays()
    if not any(taken):
        return heritage
    rank = dist.get_rank()
    # Heirs have nothing like it, perhaps: those who give say what it is made of.
    needed = {piece.key for pieces in taken for piece in pieces}
    made_of = gather_json(
        {
            key: {kind: str(tensor.dtype) for kind, tensor in stretches[0][1].items()}
            for key, stretches in own.store.items()
            if key in needed and leaving[rank]
        }
    )
    for piece in taken[rank]:
        kinds = next(each[piece.key] for each in made_of if piece.key in each)
        empty = {
            kind: torch.empty(piece.size, dtype=getattr(torch, dtype.removeprefix("torch.")))
            for kind, dtype in kinds.items()
        }
        heritage.add(piece.key, piece.start, empty)
    exchange(plan_refill(held, taken, nodes).copies, own.store, heritage.store)
    return heritage
