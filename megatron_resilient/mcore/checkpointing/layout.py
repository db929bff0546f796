"""Who holds what of the training state in this generation, known to every rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_resilient.algorithms.expert_selection import TwoLevels
from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.algorithms.write_plan import Masters, WritePlan, plan_writes, wanted_kinds
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import ArrayInfo, expert_of
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.transfer import Holding

if TYPE_CHECKING:
    from megatron_resilient.mcore.checkpointing.contents import Contents

Kinds = dict[str, tuple[str, ...]]  # key -> kinds to save


@dataclass(frozen=True)
class Layout:
    """What all ranks hold, for as long as no expert moves.

    Attributes:
        held: pieces of every rank.
        arrays: {key: what the array is}.
        placement: {layer: expert of each slot}, of all pipeline stages.
        layers: numbers of the MoE layers, ascending.
        experts: logical experts of a layer; 0 without any.
    """

    held: list[list[Piece]]
    arrays: dict[str, ArrayInfo]
    placement: dict[int, Holding]
    layers: list[int]
    experts: int

    @classmethod
    def gather(cls, contents: "Contents") -> "Layout":
        """Asks all ranks. Collective."""
        own = contents.arrays()
        told = gather_json(
            {
                "pieces": own.pieces(),
                "arrays": [[k, i.shape, i.kinds] for k, i in contents.infos(own).items()],
                "placement": sorted(contents.holdings().items()),
            }
        )
        arrays: dict[str, ArrayInfo] = {}
        for each in told:
            for key, shape, kinds in each["arrays"]:
                known = arrays.get(key)
                # Who holds a stretch of a nameless array knows its length from there on only.
                if known is None or ArrayInfo(tuple(shape), kinds).size > known.size:
                    arrays[key] = ArrayInfo(tuple(shape), kinds)
        numbers = {expert for key in arrays if (expert := expert_of(key)) is not None}
        return cls(
            [[Piece(*piece) for piece in each["pieces"]] for each in told],
            arrays,
            {int(layer): holding for each in told for layer, holding in each["placement"]},
            sorted({layer for layer, _ in numbers}),
            1 + max((expert for _, expert in numbers), default=-1),
        )

    def plan(self, kinds: Kinds) -> WritePlan:
        """Decides who writes what of these kinds."""
        return plan_writes(
            self.held,
            {
                key: sum(ELEMENT_BYTES[self.arrays[key].kinds[kind]] for kind in own)
                for key, own in kinds.items()
            },
        )

    def kinds(self, selection: TwoLevels, masters: Masters) -> tuple[Kinds, Kinds]:
        """Returns what a save writes, and what it takes into memory beside that."""
        names = {key: info.kinds for key, info in self.arrays.items()}
        persist = wanted_kinds(names, self._numbered(selection.persist), masters)
        snapshot = wanted_kinds(names, self._numbered(selection.snapshot), masters)
        beside = {
            key: tuple(kind for kind in own if kind not in persist.get(key, ()))
            for key, own in snapshot.items()
        }
        return persist, {key: own for key, own in beside.items() if own}

    def _numbered(self, selection: list[tuple[int, ...]]) -> list[tuple[int, int]]:
        return [
            (layer, expert)
            for layer, experts in zip(self.layers, selection, strict=True)
            for expert in experts
        ]
