"""What happens to the nodes of a cluster: who is there at first, who goes and comes, and when."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from megatron_resilient.errors import TraceError

# `leave` is a departure that is told before: state can be handed over. `remove` is a loss.
Kind = Literal["add", "remove", "leave"]
# More nodes than these take too much memory.
MOST_NODES = 1_000_000


class NodeEvent(NamedTuple):
    """One node at one time.

    Attributes:
        seconds: since the trace began.
        kind: what.
        node: which.
    """

    seconds: float
    kind: Kind
    node: str


@dataclass(frozen=True)
class Change:
    """All that happens at one time.

    Attributes:
        seconds: since the trace began.
        lost: nodes that are gone without notice.
        left: nodes that leave in peace.
        joined: nodes that come.
    """

    seconds: float
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The nodes of a cluster over time.

    Attributes:
        start: nodes that are there at first.
        changes: in ascending order of time, all of them after 0 and before `seconds`.
        seconds: how long it lasts.
        source: where it comes from, for people.
    """

    start: tuple[str, ...]
    changes: tuple[Change, ...]
    seconds: float
    source: str

    @classmethod
    def of(cls, events: Iterable[NodeEvent], seconds: float | None, source: str) -> "Trace":
        """Puts a trace together; what is added at 0 is there at first.

        Args:
            events: in the order of time; at one time in the order in which they happen.
            seconds: how long the trace lasts; None: up to the last event.
            source: for people, and for errors.

        Raises:
            TraceError: time runs backwards, a node comes twice, or one goes that is not there.
        """
        present: dict[str, None] = {}
        start: tuple[str, ...] = ()
        changes = []
        last = 0.0
        for at, group in groupby(events, key=lambda event: event.seconds):
            if not (math.isfinite(at) and at >= last):
                raise TraceError(f"{source}: an event at {at:g} s after one at {last:g} s")
            last = at
            if seconds is not None and at >= seconds:
                break
            before = dict(present)
            gone: dict[str, Kind] = {}
            for _, kind, node in group:
                _play(present, gone, kind, node, f"{source}: at {at:g} s")
            if at == 0:
                start = tuple(present)
                continue
            changes.append(
                Change(
                    at,
                    tuple(n for n, k in gone.items() if n in before and k == "remove"),
                    tuple(n for n, k in gone.items() if n in before and k == "leave"),
                    tuple(n for n in present if n not in before or n in gone),
                )
            )
        return cls(start, tuple(changes), last if seconds is None else seconds, source)

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes at a time."""
        return max((number for _, number in self.sizes()), default=0)

    @property
    def node_seconds(self) -> float:
        """Seconds of all nodes together: what is paid for."""
        sizes = [*self.sizes(), (self.seconds, 0)]
        return sum(n * (after - at) for (at, n), (after, _) in pairwise(sizes))

    @property
    def mean_seconds_between_losses(self) -> float:
        """Seconds between changes that lose nodes without notice; infinite if there is none."""
        losses = sum(1 for change in self.changes if change.lost)
        return self.seconds / losses if losses else math.inf

    def sizes(self) -> list[tuple[float, int]]:
        """Returns (time, nodes from then on), beginning at 0."""
        number = len(self.start)
        found = [(0.0, number)]
        for change in self.changes:
            number += len(change.joined) - len(change.lost) - len(change.left)
            found.append((change.seconds, number))
        return found

    def events(self) -> list[NodeEvent]:
        """Returns one event for each node and change, departures first."""
        found = [NodeEvent(0.0, "add", node) for node in self.start]
        for change in self.changes:
            found += [NodeEvent(change.seconds, "remove", node) for node in change.lost]
            found += [NodeEvent(change.seconds, "leave", node) for node in change.left]
            found += [NodeEvent(change.seconds, "add", node) for node in change.joined]
        return found

    def window(self, begin: float, seconds: float) -> "Trace":
        """Returns a part of it, with the nodes that are there at `begin` there at first.

        After its end a trace goes on without changes.

        Raises:
            TraceError: a part that cannot be.
        """
        if not (begin >= 0 and seconds > 0 and math.isfinite(begin + seconds)):
            raise TraceError(
                f"{self.source}: {seconds:g} s from {begin:g} s on are no part of a trace"
            )
        present: dict[str, None] = {}
        later = []
        for event in self.events():
            if event.seconds > begin:
                later.append(event._replace(seconds=event.seconds - begin))
            elif event.kind == "add":
                present[event.node] = None
            else:
                del present[event.node]
        first = [NodeEvent(0.0, "add", node) for node in present]
        return Trace.of(first + later, seconds, self.source)

    def capped(self, nodes: int) -> "Trace":
        """Returns the same with at most so many nodes in use; others take the place of lost ones.

        Nodes that wait cost nothing: they are not part of what is returned.
        """
        waiting: dict[str, None] = {}
        present: dict[str, None] = {}
        events = []
        for at, group in groupby(self.events(), key=lambda event: event.seconds):
            for event in group:
                if event.kind == "add":
                    waiting[event.node] = None
                elif event.node in waiting:
                    del waiting[event.node]
                else:
                    del present[event.node]
                    events.append(event)
            for node in list(waiting)[: nodes - len(present)]:
                del waiting[node]
                present[node] = None
                events.append(NodeEvent(at, "add", node))
        return Trace.of(events, self.seconds, self.source)


def _play(present: dict[str, None], gone: dict[str, Kind], kind: Kind, node: str, at: str) -> None:
    if kind == "add":
        if node in present:
            raise TraceError(f"{at} node {node!r} comes, and is there already")
        present[node] = None
    else:
        if node not in present:
            raise TraceError(f"{at} node {node!r} goes, and is not there")
        del present[node]
        gone[node] = kind
