"""What each system costs, measured in short runs of its own; and what a simulator makes of it.

A cost is the time that was lost: from its cause to the end of the third step after it, less what
those steps, and others in between, take when nothing happens. So slow first steps, and what
newcomers or saves take from the cores while others train, are part of it.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.replay_accounts import Mark
from benchmarks.replay_run import Recording
from benchmarks.replay_systems import (
    JOIN_WINDOW_SECONDS,
    LAYERS,
    NODES,
    SLOTS,
)
from megatron_resilient.simulation.compare import Options, Result, choose_settings, simulate
from megatron_resilient.simulation.costs import Costs, SaveCost
from megatron_resilient.simulation.policy import Policy
from megatron_resilient.simulation.systems import parse_system
from megatron_resilient.simulation.trace import Trace
from megatron_resilient.simulation.workload import Workload

WARM_UP = 3  # steps after a change that are part of its cost
BESIDE = 2  # steps after a save that are part of its cost
SAVE_INTERVAL = 6
EXPERTS = 8
WORKLOAD = Workload(
    nodes=NODES,
    ranks_per_node=1,
    # All costs are measured as they come, so loads and bytes must not be counted again.
    loads=((1 << 20,) * EXPERTS,) * LAYERS,
    slots_per_node=SLOTS,
    moe_layers=LAYERS,
    expert_bytes=0.0,
    dense_bytes=0.0,
)


@dataclass(frozen=True)
class Stop:
    """One change of members.

    Attributes:
        at: when it was caused, by the clock of the machine.
        before: nodes that trained until then.
        nodes: that train after it.
    """

    at: float
    before: int
    nodes: int


@dataclass
class Session:
    """A calibration run, as it was driven.

    Attributes:
        recording: of it.
        stops: changes in their order, the start not among them.
        first: nodes at the start.
    """

    recording: Recording = field(default_factory=Recording)
    stops: list[Stop] = field(default_factory=list)
    first: int = NODES

    def after(self, number: int) -> list[Mark]:
        """Returns the marks from a stop up to the next one; -1: from the start."""
        begin = self.stops[number].at if number >= 0 else 0.0
        later = self.stops[number + 1 :]
        end = later[0].at if later else float("inf")
        return [mark for mark in self.recording.marks if begin < mark.seconds <= end]


def steady_steps(
    segments: Iterable[tuple[int, Sequence[Mark]]], interval: int
) -> tuple[dict[int, float], float]:
    """Returns the mean seconds of a step by number of nodes, and what a save adds.

    Args:
        segments: (nodes, marks while so many trained, without the first ones).
        interval: steps between two saves.

    Returns:
        ({nodes: seconds}, seconds that the steps after a save took more).
    """
    quiet: dict[int, list[float]] = {}
    saves: list[tuple[int, float]] = []
    for nodes, marks in segments:
        taken = {mark.step: mark.seconds - last.seconds for last, mark in pairwise(marks)}
        for step, seconds in taken.items():
            since = (step - 1) % interval
            if since >= BESIDE or step <= interval:
                quiet.setdefault(nodes, []).append(seconds)
            elif since == 0:
                beside = [taken.get(step + later) for later in range(BESIDE)]
                if all(each is not None for each in beside):
                    saves.append((nodes, sum(each for each in beside if each is not None)))
    steps = {nodes: statistics.fmean(each) for nodes, each in quiet.items()}
    extra = [seconds - BESIDE * steps[nodes] for nodes, seconds in saves if nodes in steps]
    return steps, max(0.0, statistics.fmean(extra)) if extra else 0.0


def lost_seconds(
    stop: Stop,
    marks: Sequence[Mark],
    steps: dict[int, float],
    known: int,
    save: float = 0.0,
    interval: int = 0,
) -> float:
    """Returns the time that a change cost, up to the end of the steps that warm up after it.

    Args:
        stop: the change.
        marks: since then, of both worlds.
        steps: seconds of a step by number of nodes.
        known: how many of the marks are of the world before.
        save: what a save adds, which is no part of it.
        interval: steps between two saves; 0: there was none.
    """
    own = marks[: known + WARM_UP]
    saves = sum((mark.step - 1) % interval == 0 for mark in own) if interval else 0
    usual = known * steps[stop.before] + WARM_UP * steps[stop.nodes] + saves * save
    return own[-1].seconds - stop.at - usual


def line_through(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns (value at 0, slope) of the line nearest to points; the slope is at least 0."""
    xs, ys = np.array(list(points)).T
    slope = max(0.0, float(np.polyfit(xs, ys, 1)[0])) if len(set(xs)) > 1 else 0.0
    return max(0.0, float(ys.mean() - slope * xs.mean())), slope


def costs_of_ours(session: Session) -> Costs:
    """Returns the costs that a calibration run of ours measured."""
    events = session.recording.events
    formed = [event for event in events if event["event"] == "recovery"]
    segments = [(session.first, session.after(-1)[WARM_UP:])]
    known = []
    for number, stop in enumerate(session.stops):
        marks = session.after(number)
        # The recovery is told with the first step that it ends in; others may have come before.
        told = next(e for e in formed if e["time"] > stop.at and e["world_size"] == stop.nodes)
        began = told["time"] - sum(told["seconds"].values())
        known.append((sum(mark.seconds <= began for mark in marks), began - stop.at))
        segments.append((stop.nodes, marks[known[-1][0] + WARM_UP :]))
    steps, save = steady_steps(segments, SAVE_INTERVAL)
    recoveries, joins, windows = [], [], []
    for number, stop in enumerate(session.stops):
        before, waited = known[number]
        seconds = lost_seconds(stop, session.after(number), steps, before, save, SAVE_INTERVAL)
        if stop.nodes < stop.before:
            recoveries.append(seconds)
        else:
            joins.append(seconds)
            windows.append(max(0.0, waited))
    saved = [event for event in events if event["event"] == "checkpoint_saved"]
    persist = statistics.fmean(event["seconds"] for event in saved)
    return _costs(
        steps,
        recovery_seconds=max(0.0, statistics.fmean(recoveries)),
        join_seconds=max(0.0, statistics.fmean(joins)),
        join_window_seconds=statistics.fmean(windows),
        our_save=SaveCost(stall_seconds=save, persist_seconds=max(0.0, persist - save)),
        source="a calibration run of ours",
    )


def costs_of_restart(session: Session) -> Costs:
    """Returns the costs that a calibration run of stock measured."""
    # When the job before was dead: what it had written until then is of no start.
    ended = [event["time"] for event in session.recording.events if event["event"] == "rolled_back"]

    def steps_after(number: int) -> list[Mark]:
        begin = ended[number] if number >= 0 else 0.0
        return [mark for mark in session.after(number) if mark.seconds > begin]

    segments = [(session.first, steps_after(-1)[WARM_UP:])]
    segments += [
        (stop.nodes, steps_after(number)[WARM_UP:]) for number, stop in enumerate(session.stops)
    ]
    steps, save = steady_steps(segments, SAVE_INTERVAL)
    starts = [
        (stop.nodes, lost_seconds(stop, steps_after(number), steps, 0))
        for number, stop in enumerate(session.stops)
    ]
    fixed, each = line_through(starts)
    return _costs(
        steps,
        restart_seconds=fixed,
        restart_seconds_per_node=each,
        join_window_seconds=JOIN_WINDOW_SECONDS,
        stock_save=SaveCost(stall_seconds=save),
        source="a calibration run of starts from Megatron's checkpoints",
    )


def predict(name: str, trace: Trace, costs: Costs, interval: int) -> Result:
    """Has the simulator play a trace."""
    return simulate(trace, parse_system(name), WORKLOAD, costs, Options(interval=interval))


def best_interval(name: str, trace: Trace, costs: Costs) -> int:
    """Returns the steps between two saves that the simulator chooses for a system."""
    policy = Policy(parse_system(name), WORKLOAD, costs)
    return choose_settings(trace, policy, Options()).interval


def _costs(steps: dict[int, float], **measured: object) -> Costs:
    step = steps[NODES]
    make: Callable[..., Costs] = Costs
    return make(
        step_seconds=step,
        relative_steps={str(nodes): seconds / step for nodes, seconds in sorted(steps.items())},
        expert_share=0.0,
        resilience_overhead=0.0,
        load_seconds_per_gib=0.0,
        refill_seconds_per_gib=0.0,
        **measured,
    )
