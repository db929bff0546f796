"""Who gets which rank: a pure function of who is there and what each of them holds.

Tensor-, context- and pipeline-parallel sizes stay what they are; the data-parallel size follows the
number of processes. Ranks are numbered as Megatron does by default (`tp-cp-ep-dp-pp`): the
tensor-parallel index runs fastest, the pipeline stage slowest.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_resilient.elastic.world import Seat


@dataclass(frozen=True)
class Candidate:
    """A process that waits for a seat.

    Attributes:
        seat: Its node, its local rank and its state.
        survivor: It had a seat in the previous generation.
    """

    seat: Seat
    survivor: bool


# A pipeline stage and a tensor-parallel index: processes of one coordinate hold the same dense
# parameters.
Coordinate = tuple[int, int]


def node_order(node: str) -> tuple[tuple[int, int, str], ...]:
    """Returns a sort key of node ids that puts `node2` before `node10`."""
    parts = re.split(r"(\d+)", node)
    return tuple((1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts)


def assign_seats(
    candidates: Iterable[Candidate], grid: Sequence[int]
) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Seats as many candidates as fill whole blocks of TP x CP x PP.

    A process keeps its coordinate as long as that has seats. Survivors come before those that are
    new, and the newest step before older ones. Rank 0 is a survivor with the newest step, unless
    each of those is needed at another coordinate or rank 0's is full. In a stage, ranks follow the
    nodes, and a tensor-parallel group stays inside a node where the coordinates allow it.

    Args:
        candidates: Processes of different (node, local rank).
        grid: Tensor-, context- and pipeline-parallel size.

    Returns:
        Seats in rank order, and the spares. No seats if there are too few for one block.
    """
    tp, cp, pp = grid
    waiting = sorted(candidates, key=_place)
    data_parallel = len(waiting) // (tp * cp * pp)
    size = cp * data_parallel  # seats of one coordinate
    if not size:
        return (), tuple(candidate.seat for candidate in waiting)
    newest = max((_step(c) for c in waiting if c.survivor), default=None)
    held, others = _keep(waiting, (tp, pp), size, newest)
    gaps = sum(size - len(keepers) for keepers in held.values())
    others.sort(key=lambda c: (not c.survivor, c.survivor and _step(c) != newest, *_place(c)))
    _fill(held, sorted(others[:gaps], key=_place), (tp, pp), size, newest)

    seats: list[Seat] = []
    for stage in range(pp):
        groups = _tensor_groups([held[stage, index] for index in range(tp)])
        if stage == 0 and newest is not None:
            # A stable sort: the first group that will do comes to the front.
            first = min(groups, key=lambda group: not _is_newest(group[0], newest))
            groups.sort(key=lambda group: group is not first)
        seats += [candidate.seat for group in groups for candidate in group]
    return tuple(seats), tuple(candidate.seat for candidate in others[gaps:])


def _place(candidate: Candidate) -> tuple[tuple[tuple[int, int, str], ...], int]:
    return node_order(candidate.seat.node), candidate.seat.local_rank


def _step(candidate: Candidate) -> int:
    return int(candidate.seat.state.get("step") or 0)


def _is_newest(candidate: Candidate, newest: int | None) -> bool:
    return candidate.survivor and _step(candidate) == newest


def _coordinate(candidate: Candidate, tp: int, pp: int) -> Coordinate | None:
    held = candidate.seat.state.get("coordinate")
    if held is None:
        return None
    stage, index = held
    return (stage, index) if 0 <= stage < pp and 0 <= index < tp else None


def _keep(
    waiting: list[Candidate], shape: tuple[int, int], size: int, newest: int | None
) -> tuple[dict[Coordinate, list[Candidate]], list[Candidate]]:
    """Returns who keeps each coordinate, at most `size` of them, and all others."""
    tp, pp = shape
    holders: dict[Coordinate, list[Candidate]] = {(s, i): [] for s in range(pp) for i in range(tp)}
    others: list[Candidate] = []
    for candidate in waiting:
        coordinate = _coordinate(candidate, tp, pp)
        (others if coordinate is None else holders[coordinate]).append(candidate)
    whole = _in_whole_groups(holders, shape)
    for coordinate, those in holders.items():
        those.sort(
            key=lambda c: (
                not c.survivor,
                not _is_newest(c, newest),
                id(c) not in whole,
                *_place(c),
            )
        )
        others += those[size:]
        holders[coordinate] = sorted(those[:size], key=_place)
    return holders, others


def _in_whole_groups(
    holders: dict[Coordinate, list[Candidate]], shape: tuple[int, int]
) -> set[int]:
    """Returns the ids of those that make a whole tensor-parallel group inside their node."""
    tp, pp = shape
    whole: set[int] = set()
    for stage in range(pp):
        for group in _tensor_groups([holders[stage, index] for index in range(tp)]):
            if len(group) == tp and len({c.seat.node for c in group}) == 1:
                whole.update(map(id, group))
    return whole


def _fill(
    held: dict[Coordinate, list[Candidate]],
    fillers: list[Candidate],
    shape: tuple[int, int],
    size: int,
    newest: int | None,
) -> None:
    """Gives every gap a filler; there are as many of these as gaps."""
    tp, pp = shape
    # Rank 0 first: it speaks for the job.
    if not any(_is_newest(candidate, newest) for candidate in held[0, 0]):
        leader = next((c for c in fillers if _is_newest(c, newest)), None)
        if leader is not None and len(held[0, 0]) < size:
            # With tp > 1 its neighbours may follow it below, as far as they are fillers too.
            held[0, 0].append(leader)
            fillers.remove(leader)
    for stage in range(pp):
        for _ in range(min(size - len(held[stage, index]) for index in range(tp))):
            group = _whole_group(fillers, tp)
            for index, candidate in enumerate(group):
                held[stage, index].append(candidate)
                fillers.remove(candidate)
    for (stage, index), keepers in held.items():
        while len(keepers) < size:
            # Best a node that has more of this stage's other indices than of this one.
            chosen = max(fillers, key=lambda c: _lack(held, stage, index, tp, c.seat.node))
            keepers.append(chosen)
            fillers.remove(chosen)


def _whole_group(fillers: list[Candidate], tp: int) -> list[Candidate]:
    """Returns the first `tp` fillers of one node; none if no node has that many."""
    of_node: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in fillers:
        of_node[candidate.seat.node].append(candidate)
        if len(of_node[candidate.seat.node]) == tp:
            return of_node[candidate.seat.node]
    return []


def _lack(
    held: dict[Coordinate, list[Candidate]], stage: int, index: int, tp: int, node: str
) -> int:
    counts = [sum(c.seat.node == node for c in held[stage, i]) for i in range(tp)]
    return max(counts) - counts[index]


def _tensor_groups(columns: list[list[Candidate]]) -> list[list[Candidate]]:
    """Returns one stage's tensor-parallel groups, in the order of their nodes.

    Args:
        columns: For every tensor-parallel index, those that hold it. Columns of unlike length give
            some groups that are too short; they come last.
    """
    by_node: list[defaultdict[str, list[Candidate]]] = []
    for column in columns:
        nodes: defaultdict[str, list[Candidate]] = defaultdict(list)
        for candidate in sorted(column, key=_place):
            nodes[candidate.seat.node].append(candidate)
        by_node.append(nodes)
    groups = []
    for node in {candidate.seat.node for column in columns for candidate in column}:
        for _ in range(min(len(nodes[node]) for nodes in by_node)):
            groups.append([nodes[node].pop(0) for nodes in by_node])
    groups.sort(key=lambda group: _place(group[0]))
    left = [sorted((c for of in nodes.values() for c in of), key=_place) for nodes in by_node]
    mixed = [
        [column[row] for column in left if row < len(column)] for row in range(max(map(len, left)))
    ]
    # Whole groups and mixed ones together in the order of nodes.
    complete = groups + [group for group in mixed if len(group) == len(columns)]
    complete.sort(key=lambda group: _place(group[0]))
    return complete + [group for group in mixed if len(group) < len(columns)]
