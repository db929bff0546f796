"""Before a planned departure: what only the leaving nodes hold goes to those that stay."""

import torch

from megatron_resilient.algorithms.refill_plan import Piece, orphans, plan_refill
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.pieces import exchange
from megatron_resilient.elastic.member import Member
from megatron_resilient.mcore.recovery.arrays import Arrays
from megatron_resilient.mcore.recovery.live_state import LiveState


def carry_out(member: Member, live: LiveState) -> bool:
    """Hands over; collective over all ranks, between two steps.

    Returns:
        Whether all nodes leave, so that there is nobody to hand over to.
    """
    own = live.arrays()
    told = gather_json(
        {"node": member.node, "leaving": sorted(member.leaving()), "held": own.pieces()}
    )
    leaving_nodes = {node for each in told for node in each["leaving"]}
    leaving = {rank: each["node"] in leaving_nodes for rank, each in enumerate(told)}
    if all(leaving.values()):
        return True
    held = [[Piece(*piece) for piece in each["held"]] for each in told]
    taken = orphans(held, leaving)
    if not any(taken):
        return False
    rank = torch.distributed.get_rank()
    # Heirs have nothing like it, perhaps: those who give say what it is made of.
    needed = {piece.key for pieces in taken for piece in pieces}
    made_of = gather_json(
        {
            key: {kind: str(tensor.dtype) for kind, tensor in stretches[0][1].items()}
            for key, stretches in own.store.items()
            if key in needed and leaving[rank]
        }
    )
    heritage = Arrays()
    for piece in taken[rank]:
        kinds = next(each[piece.key] for each in made_of if piece.key in each)
        heritage.add(
            piece.key,
            piece.start,
            {
                kind: torch.empty(
                    piece.size,
                    dtype=getattr(torch, dtype.removeprefix("torch.")),
                    device=torch.cuda.current_device(),
                )
                for kind, dtype in kinds.items()
            },
        )
    plan = plan_refill(held, taken, [each["node"] for each in told])
    exchange(plan.copies, own.store, heritage.store)
    live.extra = heritage
    return False
