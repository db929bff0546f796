"""What a replay decides and counts, apart from processes: events, worlds, steps that are kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_resilient.simulation.trace import Change, Trace


class Mark(NamedTuple):
    """Where training stands from a moment on.

    Attributes:
        seconds: when.
        step: the last step that is done, in the numbers of the run.
    """

    seconds: float
    step: int


def sped_up(trace: Trace, factor: float) -> Trace:
    """Returns the same events, `factor` times as fast."""
    changes = tuple(replace(change, seconds=change.seconds / factor) for change in trace.changes)
    return replace(trace, changes=changes, seconds=trace.seconds / factor)


def without_notice(trace: Trace) -> Trace:
    """Returns the trace for who hears of no departure before it: all are losses."""
    changes = tuple(
        Change(change.seconds, (*change.lost, *change.left), (), change.joined)
        for change in trace.changes
    )
    return replace(trace, changes=changes)


def kept(marks: Sequence[Mark]) -> list[Mark]:
    """Returns how many steps that count were done when: those that were never done again.

    A mark that goes back, because a job starts again from a checkpoint, takes the steps after it
    out of all marks before. So nothing counts twice, and the last mark is the result.
    """
    found: list[Mark] = []
    least: int | None = None
    for mark in reversed(marks):
        least = mark.step if least is None else min(least, mark.step)
        found.append(Mark(mark.seconds, least))
    return found[::-1]


@dataclass
class Members:
    """Who is there, and who trains, of a job that starts again at each change.

    It trains on a multiple of `group` nodes, as stock Megatron and DeepSpeed do: an expert-parallel
    group has all experts once.

    Attributes:
        group: nodes of an expert-parallel group.
        window_seconds: after the last arrival, for more to come.
        alive: all that are there, in the order of their arrival.
        world: those that train, or are started to do so.
    """

    group: int
    window_seconds: float = 0.0
    alive: tuple[str, ...] = ()
    world: tuple[str, ...] = ()
    _arrived: float = 0.0

    def lose(self, nodes: Iterable[str]) -> bool:
        """Takes nodes out; returns whether the job has to stop."""
        gone = set(nodes)
        self.alive = tuple(node for node in self.alive if node not in gone)
        return not gone.isdisjoint(self.world)

    def join(self, nodes: Iterable[str], now: float) -> None:
        """Adds nodes; they train when the next world is formed."""
        self.alive += tuple(nodes)
        self._arrived = now

    def may_grow(self, now: float) -> bool:
        """Whether starting anew now would take in nodes that are there for long enough."""
        waited = now >= self._arrived + self.window_seconds
        return waited and self._used() > len(self.world)

    def form(self) -> tuple[str, ...]:
        """Forms the next world: the nodes of the last one first; empty if they are too few."""
        old = [node for node in self.world if node in self.alive]
        others = [node for node in self.alive if node not in old]
        self.world = tuple([*old, *others][: self._used()])
        return self.world

    def _used(self) -> int:
        return len(self.alive) // self.group * self.group
