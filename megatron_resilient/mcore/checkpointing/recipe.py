"""What every rank writes in a save, and into which files: the same for all saves of a selection."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_resilient.algorithms.expert_selection import TwoLevels
from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.algorithms.write_plan import Masters, Unit
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.mcore.checkpointing.layout import Kinds, Layout

Files = tuple[tuple[str, tuple[Stretch, ...]], ...]


@dataclass(frozen=True)
class Recipe:
    """Who writes what. Every rank makes the same one, and knows from it what all of them write.

    Attributes:
        layout: who holds what.
        persist: kinds that go to storage.
        units: that every rank writes.
        beside: that every rank takes into memory beside that.
        beside_kinds: and which kinds of them.
        apart: the fp32 values of an expert are in files of their own, because later saves may
            replace them without its moments.
    """

    layout: Layout
    persist: Kinds
    units: tuple[tuple[Unit, ...], ...]
    beside: tuple[tuple[Unit, ...], ...]
    beside_kinds: Kinds
    apart: bool

    @classmethod
    def make(cls, layout: Layout, selection: TwoLevels, masters: Masters) -> "Recipe":
        """Decides it. Takes a while: not for the time in which training waits."""
        persist, beside = layout.kinds(selection, masters)
        return cls(
            layout,
            persist,
            layout.plan(persist).units,
            layout.plan(beside).units if beside else ((),) * len(layout.held),
            beside,
            masters == "all",
        )

    @cached_property
    def is_exact(self) -> bool:
        """Whether the save has everything."""
        arrays = self.layout.arrays
        return self.persist.keys() == arrays.keys() and all(
            set(own) == set(arrays[key].kinds) for key, own in self.persist.items()
        )

    def files(self, rank: int, folder: str) -> Files:
        """Returns (path, contents) of what a rank writes.

        Args:
            rank: of all.
            folder: of the save, relative to the directory.
        """
        held = _by_key(self.layout.held[rank])
        return tuple(
            (_path(folder, unit, number, mark, rank), tuple(_stretches(held, unit.pieces, kinds)))
            for number, unit in enumerate(self.units[rank])
            for mark, kinds in self._parts(unit)
        )

    def in_memory(self, rank: int) -> list[Stretch]:
        """Returns what a rank takes into memory beside what it writes."""
        held = _by_key(self.layout.held[rank])
        return [
            stretch
            for unit in self.beside[rank]
            for stretch in _stretches(held, unit.pieces, self.beside_kinds)
        ]

    def dtype(self, stretch: Stretch) -> str:
        """Returns the type of a stretch's elements."""
        return self.layout.arrays[stretch.key].kinds[stretch.kind]

    def _parts(self, unit: Unit) -> list[tuple[str, Kinds]]:
        """Returns what of a unit is together in a file: (a mark for its name, kinds by key)."""
        own = {piece.key: self.persist[piece.key] for piece in unit.pieces}
        if not (self.apart and unit.name.startswith("expert/")):
            return [("", own)]
        main = {key: ("main",) for key, each in own.items() if "main" in each}
        moments = {key: tuple(k for k in each if k != "main") for key, each in own.items()}
        parts = [("main", main), ("moments", {key: each for key, each in moments.items() if each})]
        return [(mark, part) for mark, part in parts if part]


def _by_key(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.key, []).append(piece)
    return found


def _stretches(
    held: dict[str, list[Piece]], pieces: Iterable[Piece], kinds: Kinds
) -> list[Stretch]:
    """Returns pieces as a rank holds them, kind by kind: each is within one tensor."""
    return [
        Stretch(piece.key, kind, max(own.start, piece.start), min(own.stop, piece.stop))
        for piece in pieces
        for own in held[piece.key]
        if own.start < piece.stop and piece.start < own.stop
        for kind in kinds.get(piece.key, ())
    ]


def _path(folder: str, unit: Unit, number: int, mark: str, rank: int) -> str:
    if not unit.name.startswith("expert/"):
        return places.dense_file(folder, number, rank)
    layer, expert, part = map(int, unit.name.split("/")[1:])
    path = places.expert_file(folder, layer, expert, part, rank)
    return path.replace(".safetensors", f".{mark}.safetensors") if mark else path
