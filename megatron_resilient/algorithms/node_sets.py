"""Sets of nodes as integers: bit i stands for node i. What must not be lost, in other words.

A set is fatal when losing all its nodes loses the last replica of some expert. Only minimal fatal
sets matter: losing a larger one loses a smaller one too.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


def members(node_set: int) -> Iterator[int]:
    """Yields the nodes of a set in ascending order."""
    while node_set:
        lowest = node_set & -node_set
        yield lowest.bit_length() - 1
        node_set ^= lowest


def from_members(nodes: Iterable[int]) -> int:
    """Returns the set that holds exactly these nodes."""
    node_set = 0
    for node in nodes:
        node_set |= 1 << int(node)
    return node_set


def from_rows(rows: npt.NDArray[np.bool_]) -> list[int]:
    """Returns one set per row of a boolean matrix [sets, nodes]."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def to_rows(node_sets: Sequence[int], nodes: int) -> npt.NDArray[np.bool_]:
    """Returns the boolean matrix [sets, nodes] of some sets: the inverse of `from_rows`."""
    size = -(-nodes // 8)
    packed = np.frombuffer(b"".join(s.to_bytes(size, "little") for s in node_sets), dtype=np.uint8)
    rows = np.unpackbits(packed.reshape(-1, size), axis=1, count=nodes, bitorder="little")
    return rows.view(np.bool_)


def minimal(node_sets: Iterable[int]) -> list[int]:
    """Returns the sets that contain no other of them, by size and then by their nodes.

    O(n * m * nodes) for n distinct sets of which m are minimal; far less if they overlap little.
    """
    distinct = set(node_sets)
    if 0 in distinct:  # the empty set is part of all others
        return [0]
    kept: list[int] = []
    # By lowest node: that of a subset lies in the superset, so few sets are compared.
    by_lowest: dict[int, list[int]] = {}
    for candidate in sorted(distinct, key=lambda s: (s.bit_count(), s)):
        if any(
            other & candidate == other
            for node in members(candidate)
            for other in by_lowest.get(node, ())
        ):
            continue
        kept.append(candidate)
        by_lowest.setdefault(next(members(candidate)), []).append(candidate)
    return kept
