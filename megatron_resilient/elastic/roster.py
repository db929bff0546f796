"""What the coordinator knows of each process."""

from collections.abc import Iterator, KeysView, MutableMapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

from megatron_resilient.elastic.messages import Hello, Ready

Slot = tuple[str, int]  # a node and a local rank on it


@dataclass(eq=False)
class Process:
    """A worker.

    Attributes:
        hello: Its latest hello.
        key: Its connection; None while it has none.
        host: The coordinator's own address on that connection.
        heard: When it was last heard of; all times are the coordinator's clock.
        lost_at: When its connection broke; None while it has one.
        proven: That connection was closed by its machine, and did not just fall silent.
        arrived: When its first hello, or its first `ready`, came.
        member: It has a seat in the latest generation.
        gives: It has none, and is giving what it holds to those who have.
        ready: Its latest `ready`; None when it is seated.
        seated_on: The connection on which it was given its seat.
        paused: It stands at the boundary that was asked for.
        finished: Exit code with which it said, or its agent said, that it is done.
        progress: Its counter of progress.
        report: Its latest facts.
        busy: Busy shares of the current window.
        in_collective: Its answer to "where are you?"; None: not asked, or not answered.
        at: The place that it gave.
    """

    hello: Hello
    key: int | None
    host: str
    heard: float
    arrived: float
    lost_at: float | None = None
    proven: bool = True
    member: bool = False
    gives: bool = False
    ready: Ready | None = None
    seated_on: int | None = None
    paused: bool = False
    finished: int | None = None
    progress: int = -1
    report: dict[str, Any] = field(default_factory=dict)
    busy: list[float] = field(default_factory=list)
    in_collective: bool | None = None
    at: str = ""

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return self.hello.node

    @property
    def slot(self) -> Slot:
        """Its node and its number there."""
        return self.hello.node, self.hello.local_rank

    @property
    def waits(self) -> bool:
        """Whether it can be given a seat."""
        return self.ready is not None and self.key is not None and self.finished is None


@dataclass(eq=False)
class Agent:
    """The agent of a node, while it is connected; attributes as in `Process`."""

    hello: Hello
    key: int
    heard: float

    def answers(self, now: float, within: float) -> bool:
        """Tells whether it was heard of within so many seconds."""
        return now - self.heard <= within


class Roster(MutableMapping[str, Process]):
    """The workers by process id, in the order of their arrival, and those of each node.

    A job of 1,000 nodes has thousands: what concerns one node must not look at all of them.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._by_id: dict[str, Process] = {}
        self._of_node: dict[str, dict[str, Process]] = {}
        self._node_of: dict[str, str] = {}  # a process may give another name when it comes back

    def of(self, node: str) -> list[Process]:
        """Returns the workers of one node, in the order of their arrival."""
        return list(self._of_node.get(node, {}).values())

    def nodes(self) -> KeysView[str]:
        """Returns the nodes that have workers."""
        return self._of_node.keys()

    def __getitem__(self, key: str) -> Process:
        return self._by_id[key]

    def __setitem__(self, key: str, process: Process) -> None:
        self._by_id[key] = process
        self._node_of[key] = process.node
        self._of_node.setdefault(process.node, {})[key] = process

    def __delitem__(self, key: str) -> None:
        del self._by_id[key]
        node = self._node_of.pop(key)
        del self._of_node[node][key]
        if not self._of_node[node]:
            del self._of_node[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    # The mapping's own would look each one up.

    def values(self) -> ValuesView[Process]:
        """Returns the workers."""
        return self._by_id.values()
