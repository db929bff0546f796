"""Who gives which part of the training state to whom, so that a new world has all of it.

State is cut into named, flat arrays; a rank holds stretches of them. After a failure, a departure
or an arrival every rank says what it holds and what it needs, and all ranks plan the same copies.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """A stretch of one flat array.

    Attributes:
        key: name of the array, the same in every world.
        start: first element.
        stop: one past the last element.
    """

    key: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


class Copy(NamedTuple):
    """One piece that `source` gives to `target`, perhaps itself."""

    piece: Piece
    source: int
    target: int


@dataclass(frozen=True)
class RefillPlan:
    """What has to be copied.

    Attributes:
        copies: by target, then in the order in which the target asked.
        missing: (rank, piece) that no rank holds.
    """

    copies: tuple[Copy, ...]
    missing: tuple[tuple[int, Piece], ...]


def plan_refill(
    held: Sequence[Sequence[Piece]], wanted: Sequence[Sequence[Piece]], nodes: Sequence[str]
) -> RefillPlan:
    """Decides where each wanted piece comes from.

    A rank takes what it has from itself, else from a rank of its node, else from the holder that
    has given least so far (ties: the lower rank). The sources of a piece may change along it.
    O(pieces that a rank wants and does not have x holders of each, + all pieces).

    Args:
        held: pieces of every rank; several ranks may hold the same.
        wanted: pieces that every rank needs.
        nodes: node of every rank.

    Returns:
        The plan; the same on every rank that calls with the same arguments.
    """
    holders: dict[str, list[tuple[int, int, int]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders.setdefault(piece.key, []).append((rank, piece.start, piece.stop))
    given = [0] * len(held)
    copies: list[Copy] = []
    missing: list[tuple[int, Piece]] = []
    for target, pieces in enumerate(wanted):
        own: dict[str, list[Piece]] = {}
        for piece in held[target]:
            own.setdefault(piece.key, []).append(piece)
        for piece in pieces:
            # Most of it is there already. Of dense state every rank of a stage may be a holder.
            if any(p.start <= piece.start and piece.stop <= p.stop for p in own.get(piece.key, ())):
                _add(copies, piece, target, target)
                continue
            for part, having in _cut(piece, holders.get(piece.key, ())):
                if not having:
                    missing.append((target, part))
                    continue
                source = _source(target, having, nodes, given)
                if source != target:
                    given[source] += part.size
                _add(copies, part, source, target)
    return RefillPlan(tuple(copies), tuple(missing))


def orphans(held: Sequence[Sequence[Piece]], leaving: Mapping[int, bool]) -> list[list[Piece]]:
    """Returns, for every rank, the pieces that it should take over from ranks that leave.

    Only what no staying rank holds; shared out such that ranks get about as many elements. Heirs
    are those that hold state themselves, if there are any.

    Args:
        held: pieces of every rank.
        leaving: whether a rank leaves, by rank; at least one must stay.
    """
    staying = [rank for rank in range(len(held)) if not leaving[rank]]
    heirs = [rank for rank in staying if held[rank]] or staying
    kept: dict[str, list[tuple[int, int, int]]] = {}
    for rank in staying:
        for piece in held[rank]:
            kept.setdefault(piece.key, []).append((rank, piece.start, piece.stop))
    taken: list[list[Piece]] = [[] for _ in held]
    load = [0] * len(held)
    seen: set[Piece] = set()
    for rank in range(len(held)):
        for piece in held[rank] if leaving[rank] else ():
            for part, having in _cut(piece, kept.get(piece.key, ())):
                if having or part in seen:
                    continue
                seen.add(part)
                heir = min(heirs, key=lambda stayer: (load[stayer], stayer))
                load[heir] += part.size
                taken[heir].append(part)
    return taken


def _cut(
    piece: Piece, holders: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[Piece, list[int]]]:
    """Yields the parts of a piece along which the set of holders stays the same."""
    if all(start <= piece.start and piece.stop <= stop for _, start, stop in holders):
        yield piece, [rank for rank, _, _ in holders]
        return
    edges = {piece.start, piece.stop}
    for _, start, stop in holders:
        edges |= {edge for edge in (start, stop) if piece.start < edge < piece.stop}
    points = sorted(edges)
    for start, stop in itertools.pairwise(points):
        having = [rank for rank, low, high in holders if low <= start and stop <= high]
        yield Piece(piece.key, start, stop), having


def _source(target: int, having: list[int], nodes: Sequence[str], given: list[int]) -> int:
    if target in having:
        return target
    near = [rank for rank in having if nodes[rank] == nodes[target]]
    return min(near or having, key=lambda rank: (given[rank], rank))


def _add(copies: list[Copy], part: Piece, source: int, target: int) -> None:
    """Adds a copy, or makes the last one longer."""
    last = copies[-1] if copies else None
    if last is not None and _continues(last, part, source, target):
        copies[-1] = Copy(Piece(part.key, last.piece.start, part.stop), source, target)
    else:
        copies.append(Copy(part, source, target))


def _continues(last: Copy, part: Piece, source: int, target: int) -> bool:
    return (last.source, last.target, last.piece.key, last.piece.stop) == (
        source,
        target,
        part.key,
        part.start,
    )
