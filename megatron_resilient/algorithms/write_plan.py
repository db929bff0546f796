"""Who writes which part of a checkpoint, so that all ranks write about as much.

MoC-System's fully sharded checkpoints (section 4) for any set of holders: every replica of an
expert, every data-parallel rank and every stretch of dense state shares the bytes.

Experts are given away whole, largest first, to the holder with least; then dense state, which may
be cut anywhere, is filled in like water. Where holders are such that this leaves a rank with too
much, a maximum flow finds the least possible, and experts are cut, but only those whose writer
would otherwise be above it.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megatron_resilient.algorithms.balanced_flow import balance_over_ranks
from megatron_resilient.algorithms.holder_sets import Atom, Ranks, atoms
from megatron_resilient.algorithms.refill_plan import Piece

# A bottleneck so much above what is possible is not worth cutting experts for.
TOLERANCE = 0.01
# balanced_flow counts in 32 bits.
_FLOW_PARTS = 1 << 28

Masters = Literal["selected", "all"]


class Unit(NamedTuple):
    """What one rank writes into one file.

    Attributes:
        name: `expert/LAYER/EXPERT/ETP`, or `dense/PP.TP`.
        pieces: by key, then by place; neighbours are one piece.
    """

    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class WritePlan:
    """Who writes what.

    Attributes:
        units: of every rank: experts by layer and number, then dense state.
        bytes: that every rank writes.
    """

    units: tuple[tuple[Unit, ...], ...]
    bytes: tuple[int, ...]

    @property
    def bottleneck(self) -> float:
        """Bytes of the rank with most, as a multiple of the mean; 1 if nothing is written."""
        total = sum(self.bytes)
        return max(self.bytes) * len(self.bytes) / total if total else 1.0


def unit_of(key: str) -> str:
    """Names the unit of an array: that of its expert, or of its (pipeline, tensor) coordinate."""
    parts = key.split("/", 4)
    return "/".join(parts[:4]) if parts[0] == "expert" else f"dense/{parts[1]}"


def wanted_kinds(
    arrays: Mapping[str, Collection[str]],
    selected: Collection[tuple[int, int]],
    masters: Masters = "selected",
) -> dict[str, tuple[str, ...]]:
    """Returns which kinds of every array a save writes; arrays that it leaves out are missing.

    The published sizes of MoC-System are those of `masters="all"`: of experts that are not selected
    the fp32 values are written all the same, only the moments stay at older versions. "selected" is
    what its Eq. 6 says.

    Args:
        arrays: {key: kinds that there are}.
        selected: (LAYER, EXPERT) as in the keys.
        masters: of which experts kind `main` is written.
    """
    chosen = set(selected)
    wanted = {}
    for key, kinds in arrays.items():
        parts = key.split("/", 4)
        if parts[0] != "expert" or (int(parts[1]), int(parts[2])) in chosen:
            wanted[key] = tuple(sorted(kinds))
        elif masters == "all" and "main" in kinds:
            wanted[key] = ("main",)
    return wanted


def plan_writes(held: Sequence[Sequence[Piece]], element_bytes: Mapping[str, int]) -> WritePlan:
    """Decides who writes what.

    Every element that is wanted and held is written exactly once, by a rank that holds it. The rank
    with most bytes is at most 1% above the least that the holders allow (and, beside that, above
    one element per cut). An expert goes to one writer unless no rank has all of it, or each such
    rank would come above the mean.

    Args:
        held: pieces of every rank; several ranks may hold the same.
        element_bytes: bytes to write per element, all wanted kinds together; keys that are missing
            are not written.

    Returns:
        The plan; the same on every rank that calls with the same arguments.
    """
    ranks = len(held)
    by_key = atoms(held, element_bytes)
    units: dict[str, list[Atom]] = {}
    for key, parts in by_key.items():
        units.setdefault(unit_of(key), []).extend(parts)
    experts = [_Expert.of(name, parts) for name, parts in units.items() if _is_expert(name)]
    dense = [atom for name, parts in units.items() if not _is_expert(name) for atom in parts]

    everything = [atom for parts in units.values() for atom in parts]
    total = sum(atom.bytes for atom in everything)
    target = max(-(-total // ranks), _most_of_one(everything, ranks)) if ranks else 0
    whole = {expert.name: expert for expert in experts if expert.holders}
    loose = [atom for expert in experts if not expert.holders for atom in expert.atoms]
    writer = _give_whole(whole.values(), dense + loose, ranks)
    shares = _Shares(dense + loose, ranks)
    load = shares.fill(_loads(whole, writer, ranks), target)
    if max(load, default=0) > (1 + TOLERANCE) * target:
        # Either experts stand in the way, or it cannot be better: only now that is worth knowing.
        target = max(target, _Shares(everything, ranks).least(target))
        while cut := _in_the_way(whole, writer, load, (1 + TOLERANCE) * target):
            loose += [atom for name in cut for atom in whole[name].atoms]
            for name in cut:
                del writer[name]
            shares = _Shares(dense + loose, ranks)
            load = shares.fill(_loads(whole, writer, ranks), target)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for rank, piece in shares.cut():
        pieces[rank].append(piece)
    for name, rank in writer.items():
        pieces[rank] += [atom.piece for atom in whole[name].atoms]
    _mend(pieces, whole, writer, element_bytes, -(-total // ranks) if ranks else 0)
    return WritePlan(
        tuple(_units(own) for own in pieces),
        tuple(sum(piece.size * element_bytes[piece.key] for piece in own) for own in pieces),
    )


class _Expert(NamedTuple):
    """One expert: its atoms, its bytes, and the ranks that have all of it."""

    name: str
    atoms: list[Atom]
    bytes: int
    holders: Ranks

    @classmethod
    def of(cls, name: str, parts: list[Atom]) -> "_Expert":
        holders = set(parts[0].holders).intersection(*(atom.holders for atom in parts[1:]))
        return cls(name, parts, sum(atom.bytes for atom in parts), tuple(sorted(holders)))


def _is_expert(name: str) -> bool:
    return name.startswith("expert/")


def _most_of_one(everything: Iterable[Atom], ranks: int) -> int:
    """Returns the most bytes that one rank has alone: it must write them."""
    alone = [0] * ranks
    for atom in everything:
        if len(atom.holders) == 1:
            alone[atom.holders[0]] += atom.bytes
    return max(alone, default=0)


def _give_whole(experts: Iterable[_Expert], others: Iterable[Atom], ranks: int) -> dict[str, int]:
    """Returns a writer for every expert: largest first, to the holder with least so far."""
    load = [0] * ranks
    for atom in others:
        if len(atom.holders) == 1:
            load[atom.holders[0]] += atom.bytes
    writer: dict[str, int] = {}
    heaps: dict[Ranks, list[tuple[int, int]]] = {}
    # Those with one holder first: they have no choice, and the others can look at where they went.
    order = sorted(experts, key=lambda e: (len(e.holders) > 1, -e.bytes, len(e.holders), e.name))
    for expert in order:
        heap = heaps.get(expert.holders)
        if heap is None:
            heap = heaps[expert.holders] = [(load[rank], rank) for rank in expert.holders]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:  # it got something as a member of another set
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        writer[expert.name] = rank
        load[rank] += expert.bytes
    return writer


def _loads(whole: Mapping[str, _Expert], writer: Mapping[str, int], ranks: int) -> list[int]:
    load = [0] * ranks
    for name, rank in writer.items():
        load[rank] += whole[name].bytes
    return load


def _in_the_way(
    whole: Mapping[str, _Expert], writer: Mapping[str, int], load: list[int], limit: float
) -> list[str]:
    """Returns experts whose writer has too much, and of which others hold at least a part."""
    return [
        name
        for name, rank in writer.items()
        if load[rank] > limit and any(len(atom.holders) > 1 for atom in whole[name].atoms)
    ]


class _Shares:
    """State that may be cut anywhere, by set of holders, and what each holder takes of it."""

    def __init__(self, parts: Iterable[Atom], ranks: int) -> None:
        self._ranks = ranks
        self._groups: dict[Ranks, list[Atom]] = {}
        for atom in parts:
            self._groups.setdefault(atom.holders, []).append(atom)
        self._sizes = {
            holders: sum(atom.bytes for atom in group) for holders, group in self._groups.items()
        }
        self._quotas: dict[Ranks, list[int]] = {}

    def fill(self, base: Sequence[int], target: int) -> list[int]:
        """Gives every holder its quota beside what it has, and returns what each rank then has.

        Args:
            base: bytes of every rank beside these.
            target: no rank has to be below that.
        """
        load = list(base)
        # Sets with fewer ranks first: larger ones flow around them.
        for holders in sorted(self._sizes, key=lambda ranks: (len(ranks), ranks)):
            added = _water(self._sizes[holders], [load[rank] for rank in holders])
            self._quotas[holders] = added
            for rank, more in zip(holders, added, strict=True):
                load[rank] += more
        if max(load, default=0) > (1 + TOLERANCE) * target:
            load = self._flow(base)
        return load

    def least(self, target: int) -> int:
        """Returns the bytes of the fullest rank if all is shared out as evenly as can be."""
        return max(self.fill([0] * self._ranks, target), default=0)

    def _flow(self, base: Sequence[int]) -> list[int]:
        """Changes the quotas such that the fullest rank has as little as possible."""
        total = sum(self._sizes.values()) + sum(base)
        grain = -(-total // _FLOW_PARTS)
        groups = list(self._sizes)
        alone = [rank for rank in range(self._ranks) if base[rank]]
        tokens = [-(-self._sizes[holders] // grain) for holders in groups]
        tokens += [-(-base[rank] // grain) for rank in alone]
        pairs = [(number, rank) for number, holders in enumerate(groups) for rank in holders]
        pairs += [(len(groups) + number, rank) for number, rank in enumerate(alone)]
        local = [quota // grain for holders in groups for quota in self._quotas[holders]]
        local += tokens[len(groups) :]
        found = balance_over_ranks(
            np.asarray(tokens, dtype=np.int64),
            np.asarray([group for group, _ in pairs], dtype=np.int64),
            np.asarray([rank for _, rank in pairs], dtype=np.int64),
            np.asarray(local, dtype=np.int64),
            self._ranks,
        )
        load, quotas = list(base), iter(found.quotas.tolist())
        for holders in groups:
            parts = list(itertools.islice(quotas, len(holders)))
            self._quotas[holders] = _in_proportion(self._sizes[holders], parts)
            for rank, more in zip(holders, self._quotas[holders], strict=True):
                load[rank] += more
        return load

    def cut(self) -> list[tuple[int, Piece]]:
        """Cuts the atoms of every set of holders, one after the other, at the quotas."""
        given: list[tuple[int, Piece]] = []
        for holders, group in self._groups.items():
            edges = list(itertools.accumulate(self._quotas[holders]))
            number = begin = 0
            for atom in group:
                piece, start = atom.piece, atom.piece.start
                end = begin + atom.bytes
                element = atom.bytes // piece.size
                while start < piece.stop:
                    while (
                        number < len(edges) - 1
                        and edges[number] - begin <= (start - piece.start) * element
                    ):
                        number += 1
                    stop = piece.stop
                    if edges[number] < end and number < len(edges) - 1:
                        up_to = piece.start + -(-(edges[number] - begin) // element)
                        stop = min(stop, max(up_to, start + 1))
                    given.append((holders[number], Piece(piece.key, start, stop)))
                    start = stop
                begin = end
        return given


def _water(amount: int, levels: Sequence[int]) -> list[int]:
    """Returns what is added to every level so that the lowest ones rise together."""
    if len(levels) == 1:
        return [amount]
    order = sorted(range(len(levels)), key=lambda place: (levels[place], place))
    filled, left = 1, amount
    height = levels[order[0]]
    while filled < len(order) and left >= filled * (levels[order[filled]] - height):
        left -= filled * (levels[order[filled]] - height)
        height = levels[order[filled]]
        filled += 1
    each, over = divmod(left, filled)
    added = [0] * len(levels)
    for number, place in enumerate(order[:filled]):
        added[place] = height + each + (number < over) - levels[place]
    return added


def _in_proportion(amount: int, parts: Sequence[int]) -> list[int]:
    """Splits an amount like the parts, without losing any."""
    whole = sum(parts)
    edges = [amount * edge // whole for edge in itertools.accumulate(parts, initial=0)]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def _mend(
    pieces: list[list[Piece]],
    whole: Mapping[str, _Expert],
    writer: Mapping[str, int],
    element_bytes: Mapping[str, int],
    mean: int,
) -> None:
    """Makes experts whole again that were cut though a holder has room for all of one."""
    load = [sum(piece.size * element_bytes[piece.key] for piece in own) for own in pieces]
    cut: dict[str, dict[int, int]] = {}  # expert -> {rank: bytes}
    for rank, own in enumerate(pieces):
        for piece in own:
            name = unit_of(piece.key)
            if name in whole and name not in writer:
                parts = cut.setdefault(name, {})
                parts[rank] = parts.get(rank, 0) + piece.size * element_bytes[piece.key]
    cut = {name: parts for name, parts in sorted(cut.items()) if len(parts) > 1}
    mended: dict[str, int] = {}
    changed = True
    while changed:  # one that is whole leaves room for others
        changed = False
        for name in sorted(cut.keys() - mended.keys()):
            parts, expert = cut[name], whole[name]
            after = {
                rank: load[rank] - parts.get(rank, 0) + expert.bytes for rank in expert.holders
            }
            best = min(after, key=lambda rank: (after[rank], rank))
            if after[best] <= mean:
                for rank, size in parts.items():
                    load[rank] -= size
                load[best] += expert.bytes
                mended[name] = best
                changed = True
    if mended:
        for rank, own in enumerate(pieces):
            pieces[rank] = [piece for piece in own if unit_of(piece.key) not in mended]
        for name, rank in mended.items():
            pieces[rank] += [atom.piece for atom in whole[name].atoms]


def _units(pieces: Iterable[Piece]) -> tuple[Unit, ...]:
    by_unit: dict[str, list[Piece]] = {}
    for piece in sorted(pieces):
        own = by_unit.setdefault(unit_of(piece.key), [])
        if own and own[-1].key == piece.key and own[-1].stop == piece.start:
            own[-1] = Piece(piece.key, own[-1].start, piece.stop)
        else:
            own.append(piece)
    return tuple(Unit(name, tuple(by_unit[name])) for name in sorted(by_unit, key=_unit_order))


def _unit_order(name: str) -> tuple[int, tuple[int, ...], str]:
    if _is_expert(name):
        return 0, tuple(int(number) for number in name.split("/")[1:]), name
    return 1, (), name
