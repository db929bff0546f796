"""Drives a system through a trace in real time, and writes down what it did."""

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.replay_accounts import Mark, kept
from benchmarks.replay_systems import System, mark_of
from megatron_resilient.simulation.trace import Trace

POLL_SECONDS = 0.1
WARM_UP = 3  # steps before the clock of a replay runs
PATIENCE_SECONDS = 180.0  # for the first steps, and for any step of a calibration


@dataclass
class Recording:
    """What a system did.

    Attributes:
        marks: where training stood, by the clock of the machine.
        events: all that the run wrote, `rolled_back` of our own among them.
    """

    marks: list[Mark] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.marks[-1].step if self.marks else 0

    def add(self, events: list[dict[str, Any]]) -> None:
        """Notes what was written."""
        self.events += events
        self.marks += [mark for mark in map(mark_of, events) if mark is not None]


def watch(system: System, recording: Recording, until: float) -> None:
    """Looks at a system up to a moment of the clock."""
    while time.time() < until:
        time.sleep(max(0.0, min(POLL_SECONDS, until - time.time())))
        recording.add(system.look())


def await_steps(system: System, recording: Recording, steps: int, after: float = 0.0) -> None:
    """Waits for steps whose marks are later than a moment.

    Raises:
        TimeoutError: they do not come.
    """
    end = time.time() + PATIENCE_SECONDS
    while sum(mark.seconds > after for mark in recording.marks) < steps:
        watch(system, recording, time.time() + POLL_SECONDS)
        if time.time() > end:
            raise TimeoutError(f"{system.name}: no step for {PATIENCE_SECONDS:g} s")


def replay(system: System, trace: Trace) -> list[Mark]:
    """Plays a trace; its clock runs from the end of the first few steps on.

    Returns:
        Steps that are kept, by seconds since then; the last mark is that of the end.
    """
    recording = Recording()
    system.start(trace.start)
    await_steps(system, recording, WARM_UP)
    begin, base = recording.marks[-1]
    for change in trace.changes:
        watch(system, recording, begin + change.seconds)
        system.take(change)
    watch(system, recording, begin + trace.seconds)
    recording.add(system.look())
    end = begin + trace.seconds
    marks = [mark for mark in recording.marks if begin <= mark.seconds <= end]
    counted = [Mark(mark.seconds - begin, mark.step - base) for mark in kept(marks)]
    return [*counted, Mark(trace.seconds, counted[-1].step)]
