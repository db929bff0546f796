"""What benchmarks/overlap.py runs: sizes of layers, and the schedules that compete. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_resilient.algorithms.cost_model import Profile
from megatron_resilient.algorithms.lanes import planned_lanes
from megatron_resilient.algorithms.pipelining import PhasePlan, phase_options
from megatron_resilient.algorithms.stage_costs import LayerWork, StageCosts, stage_costs
from megatron_resilient.algorithms.stream_model import ORDERS, STAGES
from megatron_resilient.comm.pipeline import Key, Schedule, same_chunk

MIB = 1 << 20
MAX_DEGREE = 8
# What the padded experts compute: this many operations take a millisecond.
FLOPS_PER_MS = 1e6
COMPUTE_ALPHA_MS = 1.0
NO_OVERLAP = "no overlap"
WORTH_A_TRY = 1.1


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        a2a_mib: MiB that a rank sends to other nodes in a dispatch.
        gather_mib: MiB of a node's gathered rows; 0 with one rank a node.
        expert_ms: of the experts, forward; backward it is twice that.
        gradient_mib: the slice of dense gradients in its backward pass.
    """

    a2a_mib: float
    gather_mib: float
    expert_ms: float
    gradient_mib: float

    @property
    def work(self) -> LayerWork:
        """The same as the scheduler takes it, with padded experts."""
        gathered = self.gather_mib * MIB
        flops = (self.expert_ms - COMPUTE_ALPHA_MS) * FLOPS_PER_MS
        gradient = round(self.gradient_mib * MIB)
        return LayerWork(self.a2a_mib * MIB, gathered, gathered, flops, gradient)


# From communication- to compute-bound; all take 300 ms or more at 100 and 400 Mbit/s, and an eighth
# of the smallest is 128 KiB.
CASES: Mapping[tuple[int, int], Sequence[Case]] = {
    (2, 2): [
        Case(2, 2, 40, 0.5),
        Case(2, 8, 40, 1),
        Case(2, 8, 160, 0),
        Case(2, 16, 80, 2),
        Case(1.25, 20, 60, 1),
        Case(1.25, 20, 240, 1.5),
        Case(1.5, 12, 200, 0),
        Case(1.5, 10, 400, 1),
        Case(1, 6, 360, 2),
        Case(1.5, 16, 160, 0.5),
        Case(2, 10, 260, 1),
        Case(1.25, 16, 30, 1),
    ],
    (4, 1): [
        Case(2, 0, 40, 0.5),
        Case(2, 0, 160, 1),
        Case(2, 0, 300, 0),
        Case(2, 0, 500, 1),
        Case(3, 0, 100, 1),
        Case(3, 0, 300, 2),
    ],
}


# One layer whose experts compute for all of their time: printed, not judged.
REAL = Case(2, 8, 120, 1)


@dataclass(frozen=True)
class Contender:
    """One way to run a pass.

    Attributes:
        name: what it is.
        kind: "sweep" (three streams), "one stream" (of communication) or NO_OVERLAP.
        schedule: what runs where.
        degree: chunks.
        predicted_ms: by the model.
    """

    name: str
    kind: str
    schedule: Schedule
    degree: int
    predicted_ms: float


def contenders(profile: Profile, work: LayerWork, backward: bool) -> tuple[list[Contender], str]:
    """Returns all ways to run a pass, equal ones once, and the name of the one that is chosen.

    Three streams: every degree in every order, the gradient slice after the last dispatch. One
    stream for all communication beside the computation, as PipeMoE and Tutel have it: every degree,
    combines after all dispatches or as soon as a chunk is ready, the slice where it does best of
    after the dispatches and at the end. No overlap: one thing after the other.
    """
    costs = stage_costs(profile, work, backward=backward)
    slice_ms = profile.allreduce.time_ms(work.gradient_bytes) if backward else 0.0
    found: dict[tuple, Contender] = {}
    chosen = phase_options([costs], MAX_DEGREE)[0].choose(slice_ms)
    picked = None
    for degree in range(1, MAX_DEGREE + 1):
        for order in ORDERS:
            plan = PhasePlan(degree, order, (1 / degree,) * degree, 0.0, (), slice_ms)
            lanes = {
                stream: [(own.stage, own.chunk) for own in row]
                for stream, row in planned_lanes(costs, plan).items()
            }
            schedule = schedule_of(costs, lanes)
            key = tuple(map(tuple, schedule.lanes.values()))
            if key not in found:
                took = makespan_ms(schedule, costs, degree, slice_ms)
                found[key] = Contender(f"{degree} {order}", "sweep", schedule, degree, took)
            if (degree, order) == (chosen.degree, chosen.order):
                picked = found[key].name
    assert picked is not None
    rows = list(found.values())
    pipelines: list[Contender] = []
    for degree in range(1, MAX_DEGREE + 1):
        ways: dict[tuple, Contender] = {}
        for title, lanes in one_stream(degree, slice_ms > 0).items():
            schedule = schedule_of(costs, lanes)
            took = makespan_ms(schedule, costs, degree, slice_ms)
            key = tuple(map(tuple, schedule.lanes.values()))
            ways[key] = Contender(f"{degree} {title}", "one stream", schedule, degree, took)
        pipelines += ways.values()
    # Those that the model finds far from the best of them are not worth the time.
    limit = WORTH_A_TRY * min(way.predicted_ms for way in pipelines)
    rows += [way for way in pipelines if way.predicted_ms <= limit]
    sequence = [*((stage, 0) for stage in STAGES), *([("gradient", 0)] if slice_ms else [])]
    schedule = schedule_of(costs, {"compute": sequence})
    took = makespan_ms(schedule, costs, 1, slice_ms)
    rows.append(Contender(NO_OVERLAP, NO_OVERLAP, schedule, 1, took))
    return rows, picked


def one_stream(degree: int, gradient: bool) -> dict[str, dict[str, list[Key]]]:
    """Returns the pipelines with one communication stream, by name."""
    into = [[("dispatch", i), ("allgather", i)] for i in range(degree)]
    back = [[("reducescatter", i), ("combine", i)] for i in range(degree)]
    # Early: a chunk goes back when the next but one has come, so that the experts always have one.
    early = [*into[:2]]
    for i in range(degree):
        early += [back[i], *into[i + 2 : i + 3]]
    found = {}
    for title, order in (("late", into + back), ("early", early)):
        flat = [key for pair in order for key in pair]
        last = max(place for place, key in enumerate(flat) if key[0] in ("dispatch", "allgather"))
        places = {"middle": last + 1, "end": len(flat)} if gradient else {"": len(flat)}
        for where, place in places.items():
            slices: list[Key] = [("gradient", 0)] if gradient else []
            found[f"{title} {where}".strip()] = {
                "communication": flat[:place] + slices + flat[place:],
                "compute": [("expert", i) for i in range(degree)],
            }
    return found


def schedule_of(costs: StageCosts, lanes: Mapping[str, Sequence[Key]]) -> Schedule:
    """Returns a schedule without the stages that have no work, and without empty streams."""
    there = [
        stage
        for stage, alpha, whole in zip(STAGES, costs.alpha_ms, costs.whole_ms, strict=True)
        if alpha + whole > 0
    ]
    kept = {
        lane: [key for key in row if key[0] in (*there, "gradient")] for lane, row in lanes.items()
    }
    kept = {lane: row for lane, row in kept.items() if row}
    needs = {stage: [before] for before, stage in pairwise(there)}
    return Schedule(kept, same_chunk(kept, needs))


def makespan_ms(schedule: Schedule, costs: StageCosts, degree: int, slice_ms: float) -> float:
    """Plays any schedule of even chunks through; O(operations)."""
    took = {
        stage: alpha + whole / degree
        for stage, alpha, whole in zip(STAGES, costs.alpha_ms, costs.whole_ms, strict=True)
    }
    took["gradient"] = slice_ms
    free = dict.fromkeys(schedule.lanes, 0.0)
    ends: dict[Key, float] = {}
    for lane, key in schedule.order:
        ready = max((ends[need] for need in schedule.needs.get(key, ())), default=0.0)
        free[lane] = ends[key] = max(free[lane], ready) + took[key[0]]
    return max(ends.values())
