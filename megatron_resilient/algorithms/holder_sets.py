"""Held pieces of arrays, cut where their holders change."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_resilient.algorithms.refill_plan import Piece

Ranks = tuple[int, ...]


class Atom(NamedTuple):
    """A piece that the same ranks hold from its first element to its last.

    Attributes:
        piece: it.
        bytes: what is to be written of it.
        holders: the ranks, ascending.
    """

    piece: Piece
    bytes: int
    holders: Ranks


def atoms(
    held: Sequence[Sequence[Piece]], element_bytes: Mapping[str, int]
) -> dict[str, list[Atom]]:
    """Cuts what is held into atoms, by key in the order of the keys' names.

    O(n log n) in the number of pieces, times the holders of an atom.

    Args:
        held: pieces of every rank; a rank may hold an element twice.
        element_bytes: bytes to write per element; keys without any are left out.
    """
    by_key: dict[str, list[tuple[int, int, int]]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            if element_bytes.get(piece.key, 0) and piece.size:
                by_key.setdefault(piece.key, []).append((piece.start, piece.stop, rank))
    known: dict[Ranks, Ranks] = {}  # equal sets are one object: thousands of atoms share few
    return {
        key: [
            Atom(
                Piece(key, start, stop),
                (stop - start) * element_bytes[key],
                known.setdefault(ranks, ranks),
            )
            for start, stop, ranks in _sweep(by_key[key])
        ]
        for key in sorted(by_key)
    }


def _sweep(stretches: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, Ranks]]:
    """Yields (start, stop, ranks) from (start, stop, rank)s, which may overlap in any way."""
    first = stretches[0]
    if all(each[:2] == first[:2] for each in stretches):
        yield first[0], first[1], tuple(sorted({rank for _, _, rank in stretches}))
        return
    changes = sorted(
        change for start, stop, rank in stretches for change in ((start, 1, rank), (stop, -1, rank))
    )
    holding: dict[int, int] = {}
    place = changes[0][0]
    waiting: tuple[int, int, Ranks] | None = None  # may go on, if the same ranks hold the next
    for edge, change, rank in changes:
        if edge > place:
            ranks = tuple(sorted(holding))
            if waiting and waiting[1:] == (place, ranks):
                waiting = (waiting[0], edge, ranks)
            else:
                if waiting:
                    yield waiting
                waiting = (place, edge, ranks) if ranks else None
            place = edge
        holding[rank] = holding.get(rank, 0) + change
        if not holding[rank]:
            del holding[rank]
    if waiting:
        yield waiting
