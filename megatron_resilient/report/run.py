"""One run, taken apart once for all sections of its report."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resilient.report.clock import RunClock
from megatron_resilient.report.series import StepSeries
from megatron_resilient.telemetry import Event, RunSummary
from megatron_resilient.telemetry.summary import replay


@dataclass(frozen=True)
class Mark:
    """Something that happened, at a place of both axes.

    Attributes:
        time: Running time, in seconds.
        step: Training step; None if the event names none.
    """

    time: float
    step: int | None


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        name: Directory, as the user gave it.
        events: All events, in the order in which they were written.
        summary: What they come to.
        clock: From wall-clock to running time.
        done: Steps that are done in the end.
        lost: For each roll-back, the steps that it lost.
        failures: Where they were.
        recoveries: Where they were.
        resumes: Where a later job went on.
    """

    name: str
    events: Sequence[Event]
    summary: RunSummary
    clock: RunClock
    done: StepSeries
    lost: list[StepSeries]
    failures: list[Mark]
    recoveries: list[Mark]
    resumes: list[Mark]

    @classmethod
    def of(cls, name: str, events: Sequence[Event]) -> "Run":
        """Returns the run that wrote `events`, of which there is at least one."""
        summary = RunSummary.from_events(events)
        clock = RunClock(events)
        done, rollbacks = replay(events)
        return cls(
            name=name,
            events=events,
            summary=summary,
            clock=clock,
            done=StepSeries.of(done[step] for step in sorted(done)),
            lost=[StepSeries.of(rollback) for rollback in rollbacks],
            failures=_marks(events, "failure", clock),
            recoveries=_marks(events, "recovery", clock),
            resumes=[
                Mark(float(clock(segment["start_time"])), segment["first_step"])
                for segment in summary.segments[1:]
            ],
        )

    def of_kind(self, kind: str) -> list[Event]:
        """Returns the events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def effective_share(self) -> float | None:
        """Share of the running time that went into steps that count; None if that is zero."""
        if not self.clock.total_seconds:
            return None
        return float(self.done.seconds.sum()) / self.clock.total_seconds


def _marks(events: Sequence[Event], kind: str, clock: RunClock) -> list[Mark]:
    return [
        Mark(float(clock(event["time"])), event["step"])
        for event in events
        if event["event"] == kind
    ]
