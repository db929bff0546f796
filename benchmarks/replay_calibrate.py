"""Short runs that costs are measured in: nodes are lost and come while all is watched."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay_costs import (
    BESIDE,
    SAVE_INTERVAL,
    WARM_UP,
    Session,
    Stop,
    costs_of_ours,
    costs_of_restart,
)
from benchmarks.replay_run import await_steps, watch
from benchmarks.replay_systems import NODES, Ours, Restart, System
from megatron_resilient.simulation.costs import Costs
from megatron_resilient.simulation.trace import Change

STEADY = 6  # steps at each size that are no part of a change's cost, with one save among them


def calibrate_ours(folder: Path, kept: Path) -> Costs:
    """Loses nodes one by one, takes them in again, and loses two at once.

    Args:
        folder: for what the job writes.
        kept: file for the events that costs are made of.
    """
    session, moment = Session(), random.Random(1)
    with Ours(folder, SAVE_INTERVAL) as system:
        names = _begin(system, session)
        for number in range(4):
            _change(system, session, moment, lost=[names.pop(number)])
        _change(system, session, moment, joined=["b0", "b1", "b2", "b3"])
        _change(system, session, moment, lost=[names.pop(), "b1"])
    _keep(session, kept)
    return costs_of_ours(session)


def calibrate_restart(folder: Path, kept: Path) -> Costs:
    """Starts on ten nodes, and again on eight, six and ten.

    Args:
        folder: for what the job writes.
        kept: file for the events that costs are made of.
    """
    session, moment = Session(), random.Random(1)
    with Restart(folder, SAVE_INTERVAL) as system:
        names = _begin(system, session)
        _change(system, session, moment, lost=[names.pop(), names.pop()])
        _change(system, session, moment, lost=[names.pop(), names.pop()])
        # All five at once, as if a node in use had been lost while four stood by.
        system.members.join(["b0", "b1", "b2", "b3", "b4"], 0.0)
        session.stops.append(Stop(time.time(), 6, 10))
        system.take(Change(0.0, lost=(names.pop(),)))
        _settle(system, session)
    _keep(session, kept)
    return costs_of_restart(session)


def _begin(system: System, session: Session) -> list[str]:
    """Starts on all nodes, and waits until steps and saves are steady; returns the nodes."""
    names = [f"a{number}" for number in range(NODES)]
    system.start(tuple(names))
    await_steps(system, session.recording, WARM_UP + 2 * SAVE_INTERVAL + BESIDE)
    return names


def _keep(session: Session, path: Path) -> None:
    stops = [[stop.at, stop.before, stop.nodes] for stop in session.stops]
    text = json.dumps({"stops": stops, "events": session.recording.events})
    path.write_text(text + "\n", encoding="utf-8")


def _change(
    system: System,
    session: Session,
    moment: random.Random,
    lost: Sequence[str] = (),
    joined: Sequence[str] = (),
) -> None:
    """Plays a change at any moment of a step, and waits until all is steady again."""
    marks = session.recording.marks
    before = session.stops[-1].nodes if session.stops else session.first
    step = marks[-1].seconds - marks[-2].seconds
    watch(system, session.recording, time.time() + moment.uniform(0, step))
    session.stops.append(Stop(time.time(), before, before - len(lost) + len(joined)))
    system.take(Change(0.0, tuple(lost), (), tuple(joined)))
    _settle(system, session)


def _settle(system: System, session: Session) -> None:
    """Waits for the change and the steps after it; marks of the world before may be among them."""
    stop = session.stops[-1]
    if isinstance(system, Ours):
        session_told = 0.0
        while not session_told:
            await_steps(system, session.recording, _since(session, stop.at) + 1, stop.at)
            session_told = max(
                (
                    event["time"]
                    for event in session.recording.events
                    if event["event"] == "recovery"
                    and event["time"] > stop.at
                    and event["world_size"] == stop.nodes
                ),
                default=0.0,
            )
        await_steps(system, session.recording, WARM_UP + STEADY, session_told)
    else:
        # One of the marks says that the job was ended.
        await_steps(system, session.recording, 1 + WARM_UP + STEADY, stop.at)


def _since(session: Session, moment: float) -> int:
    return sum(mark.seconds > moment for mark in session.recording.marks)
