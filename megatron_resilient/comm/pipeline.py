"""Which operation runs on which stream, in which order, and after what: a static schedule.

The chunks of an MoE layer go through dispatch, AllGather, experts, ReduceScatter and combine on
three streams (FSMoE, arXiv 2501.10714, section 4.2). A schedule is fixed before it runs and is the
same on every rank: streams that chose their next operation as they go could choose differently on
two ranks, and then two collectives of one group wait for each other for ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_resilient.errors import PlanError

INTER, INTRA, COMPUTE = "inter", "intra", "compute"

# An operation's name and its chunk.
Key = tuple[str, int]


@dataclass(frozen=True)
class Schedule:
    """Operations by stream. Building it is O(operations + needs); build once, run often.

    Attributes:
        lanes: what each stream runs, in this order.
        needs: what has to be done before an operation, besides what its stream runs before it. Its
            function is given the results of these, in this order. Left out: nothing.
        order: an order in which one thread can issue all operations; the same on every rank.
        uses: how many operations take each result.

    Raises:
        PlanError: an operation stands twice, needs one that is nowhere, or they wait in a circle.
    """

    lanes: Mapping[str, Sequence[Key]]
    needs: Mapping[Key, Sequence[Key]] = field(default_factory=dict)
    order: tuple[tuple[str, Key], ...] = field(init=False)
    uses: Mapping[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        keys = [key for lane in self.lanes.values() for key in lane]
        known = set(keys)
        if len(known) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise PlanError(f"{name(twice)} stands twice in the schedule")
        uses = dict.fromkeys(keys, 0)
        for key in keys:
            for need in self.needs.get(key, ()):
                if need not in known:
                    raise PlanError(f"{name(key)} needs {name(need)}, which no stream runs")
                uses[need] += 1
        object.__setattr__(self, "uses", uses)
        object.__setattr__(self, "order", tuple(self._issue_order()))

    def _issue_order(self) -> Iterator[tuple[str, Key]]:
        place = dict.fromkeys(self.lanes, 0)
        done: set[Key] = set()
        left = len(self.uses)
        while left:
            before = left
            for lane, keys in self.lanes.items():
                if place[lane] == len(keys):
                    continue
                key = keys[place[lane]]
                if all(need in done for need in self.needs.get(key, ())):
                    done.add(key)
                    place[lane] += 1
                    left -= 1
                    yield lane, key
            if left == before:
                stuck = (lane[place[s]] for s, lane in self.lanes.items() if place[s] < len(lane))
                raise PlanError(f"the schedule waits in a circle: {', '.join(map(name, stuck))}")


def same_chunk(
    lanes: Mapping[str, Sequence[Key]], needs: Mapping[str, Sequence[str]]
) -> dict[Key, tuple[Key, ...]]:
    """Returns needs by operation and chunk from needs by name: chunk i needs chunk i.

    Args:
        lanes: what each stream runs.
        needs: for an operation's name the names of those whose results it takes.
    """
    return {
        key: tuple((need, key[1]) for need in needs[key[0]])
        for lane in lanes.values()
        for key in lane
        if key[0] in needs
    }


def name(key: Key) -> str:
    """Returns an operation's name for people."""
    return f"{key[0]} of chunk {key[1]}"


@dataclass(frozen=True)
class Span:
    """One operation as it ran.

    Attributes:
        lane: its stream.
        key: its name and chunk.
        start_seconds: since the run began.
        end_seconds: since the run began. On CUDA both are times of the device.
    """

    lane: str
    key: Key
    start_seconds: float
    end_seconds: float
