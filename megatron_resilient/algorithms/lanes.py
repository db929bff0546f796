"""The operations of one pass, stream by stream: what an executor runs and a picture shows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_resilient.algorithms.pipelining import PhasePlan
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import STAGES, simulate

# The stream of every operation; lanes of a picture in this order.
STREAM_OF = {
    "dispatch": "inter",
    "gradient": "inter",
    "combine": "inter",
    "allgather": "intra",
    "reducescatter": "intra",
    "expert": "compute",
}
# The lists of an event: stage, chunk, start and end in seconds.
Record = list[str | int | float]
STREAMS = ("inter", "intra", "compute")
_RANK = {stage: rank for rank, stage in enumerate((*STAGES[:-1], "gradient", STAGES[-1]))}


@dataclass(frozen=True)
class Operation:
    """One operation, and when the model expects it.

    Attributes:
        stage: Key of `STREAM_OF`.
        chunk: From 0; 0 for the gradient slice.
        start_ms: Since the first dispatch.
        end_ms: The same.
    """

    stage: str
    chunk: int
    start_ms: float
    end_ms: float


def planned_lanes(costs: StageCosts, plan: PhasePlan) -> Mapping[str, tuple[Operation, ...]]:
    """Returns the operations of each stream in the order in which it runs them.

    The list is static: ranks that follow it start every collective in the same order, whatever
    their clocks say. Waiting for chunk i's operation of the stage before is all they need besides.
    Operations that take no time (an AllGather without bytes) are listed too. O(r log r).

    Args:
        costs: Those that the plan was made with.
        plan: Of one pass.

    Returns:
        By stream, in the order of `STREAMS`.
    """
    durations = costs.durations_ms(np.array([plan.fractions]))
    played = simulate(durations, [plan.degree], plan.order, plan.slice_ms)
    operations = [
        Operation(
            stage, chunk, float(played.starts[row, 0, chunk]), float(played.ends[row, 0, chunk])
        )
        for row, stage in enumerate(STAGES)
        for chunk in range(plan.degree)
    ]
    if plan.slice_ms > 0:
        start, end = float(played.slice_starts[0]), float(played.slice_ends[0])
        operations.append(Operation("gradient", 0, start, end))
    # By end, which never decreases along a stream; what takes no time stands after what ends then.
    operations.sort(key=lambda own: (own.end_ms, own.start_ms, _RANK[own.stage], own.chunk))
    return {
        stream: tuple(own for own in operations if STREAM_OF[own.stage] == stream)
        for stream in STREAMS
    }


def lane_records(lanes: Mapping[str, tuple[Operation, ...]]) -> dict[str, list[Record]]:
    """Returns lanes as the event `schedule` has them: [stage, chunk, start, end], in seconds."""
    return {
        stream: [[own.stage, own.chunk, own.start_ms / 1e3, own.end_ms / 1e3] for own in lane]
        for stream, lane in lanes.items()
    }
