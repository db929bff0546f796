"""The order of the intra-node stream by name, where nothing is known of how long operations take.

FSMoE (arXiv 2501.10714), section 4.2, has one order; see `stream_model.ORDERS` for all.
"""

from collections.abc import Sequence

from megatron_resilient.algorithms.lanes import planned_lanes
from megatron_resilient.algorithms.pipelining import PhasePlan
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import ORDERS, STAGES
from megatron_resilient.errors import PlanError

Step = tuple[str, int]  # an operation's name and its chunk


def intra_order(order: str | Sequence[Step], shares: Sequence[float]) -> tuple[Step, ...]:
    """Returns every AllGather and ReduceScatter in the order of the intra-node stream.

    A name is played through with stages that all take the same time: with costs at hand, use
    `planned_lanes` and give its list.

    Args:
        order: one of `ORDERS`, or the list itself.
        shares: of the chunks.

    Raises:
        PlanError: no such name, or a list that lacks an operation or has one too many.
    """
    chunks = range(len(shares))
    if isinstance(order, str):
        if order not in ORDERS:
            raise PlanError(f"order {order!r} of the intra-node stream: one of {', '.join(ORDERS)}")
        same = StageCosts((0.0,) * len(STAGES), (1.0,) * len(STAGES))
        plan = PhasePlan(len(shares), order, tuple(shares), 0.0, (), 0.0)
        return tuple((own.stage, own.chunk) for own in planned_lanes(same, plan)["intra"])
    steps = tuple((name, chunk) for name, chunk in order)
    if sorted(steps) != sorted((n, c) for n in ("allgather", "reducescatter") for c in chunks):
        raise PlanError(
            f"order {steps} of the intra-node stream: must have allgather and reducescatter of "
            f"every chunk from 0 to {len(shares) - 1} once"
        )
    return steps
