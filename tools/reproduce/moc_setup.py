"""Models and clusters of the MoC-System paper (arXiv 2408.04307, section 6.1), as state to save.

The paper gives layers, hidden sizes and experts; every other layer is an MoE layer. Parameters are
counted here as GPT-2's (vocabulary of 50257, 1024 positions, tied output). A parameter has a bf16
weight (2 bytes), and an fp32 master and two moments in the optimizer (12 bytes), as in its Eq. 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_resilient.algorithms.expert_selection import Selection, select
from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.algorithms.write_plan import Masters, wanted_kinds
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES

DTYPES = {"weight": "BF16", "main": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
WEIGHT = ("weight",)
OPTIMIZER = ("main", "exp_avg", "exp_avg_sq")
Kinds = Mapping[str, tuple[str, ...]]  # key of an array -> kinds of it


@dataclass(frozen=True)
class Model:
    """A model of the paper.

    Attributes:
        name: of it.
        layers: Transformer layers; every second one is an MoE layer.
        hidden: size; FFNs have four times that.
        experts: of a layer.
    """

    name: str
    layers: int
    hidden: int
    experts: int

    @property
    def moe_layers(self) -> int:
        """MoE layers."""
        return self.layers // 2

    @property
    def ffn(self) -> int:
        """Parameters of an FFN, and so of an expert."""
        return 8 * self.hidden**2 + 5 * self.hidden

    def dense(self) -> dict[str, int]:
        """Returns parameters that are no expert's, by layer-wise unit (the paper's section 4.2)."""
        hidden = self.hidden
        units = {"embedding": (50257 + 1024) * hidden, "norm": 2 * hidden}
        for layer in range(self.layers):
            units[f"{layer}.attention"] = 4 * hidden**2 + 8 * hidden
            is_moe = layer % 2
            units[f"{layer}.ffn"] = hidden * self.experts if is_moe else self.ffn
        return units

    @property
    def dense_parameters(self) -> int:
        """Parameters that are no expert's."""
        return sum(self.dense().values())

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return self.moe_layers * self.experts * self.ffn

    def arrays(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Returns {key: (elements, kinds)}; weights and optimizer apart, as ZeRO-2 holds them."""
        found = {"dense/0.0/optimizer": (self.dense_parameters, OPTIMIZER)}
        for name, size in self.dense().items():
            found[f"dense/0.0/weight/{name}"] = (size, WEIGHT)
        for layer in range(self.moe_layers):
            for expert in range(self.experts):
                found[f"expert/{layer}/{expert}/0/optimizer"] = (self.ffn, OPTIMIZER)
                found[f"expert/{layer}/{expert}/0/weight"] = (self.ffn, WEIGHT)
        return found

    def select(self, save: int, k: int) -> Selection:
        """Returns the experts of a save, in turn."""
        return select("sequential", save, self.moe_layers, self.experts, k)

    def wanted(
        self, chosen: Selection, masters: Masters, parts: tuple[str, ...] = ("weight", "optimizer")
    ) -> Kinds:
        """Returns what a save has, by the rule of training (`wanted_kinds`).

        Args:
            chosen: experts of every MoE layer that are saved.
            masters: of which experts the fp32 masters are saved.
            parts: of the experts' state that partial saves apply to; the rest is saved of all.
        """
        names = {key: kinds for key, (_, kinds) in self.arrays().items()}
        pairs = [(layer, expert) for layer, own in enumerate(chosen) for expert in own]
        partial = wanted_kinds(names, pairs, masters)
        every = [(layer, own) for layer in range(self.moe_layers) for own in range(self.experts)]
        full = wanted_kinds(names, every)
        found = {}
        for key in names:
            is_partial = key.startswith("expert") and key.rsplit("/", 1)[1] in parts
            if kinds := (partial if is_partial else full).get(key):
                found[key] = kinds
        return found

    def element_bytes(self, kinds: Kinds) -> dict[str, int]:
        """Returns bytes that are saved of every element, by key."""
        return {key: sum(ELEMENT_BYTES[DTYPES[kind]] for kind in own) for key, own in kinds.items()}

    def total_bytes(self, kinds: Kinds) -> int:
        """Returns bytes of a save."""
        sizes = self.arrays()
        return sum(sizes[key][0] * each for key, each in self.element_bytes(kinds).items())


@dataclass(frozen=True)
class Case:
    """A set-up of the paper: data parallel ranks, in groups that hold all experts once.

    Attributes:
        name: of it.
        ranks: GPUs, all data parallel.
        group: GPUs of an expert-parallel group.
    """

    name: str
    ranks: int
    group: int

    def expert_holders(self, model: Model, expert: int) -> list[int]:
        """Returns the ranks that have an expert: one in each group."""
        first = expert * self.group // model.experts
        return list(range(first, self.ranks, self.group))

    def held(self, model: Model) -> list[list[Piece]]:
        """Returns what every rank has under ZeRO-2: weights whole, of the optimizer its shard."""
        held: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for key, (size, kinds) in model.arrays().items():
            holders = list(range(self.ranks))
            if key.startswith("expert"):
                holders = self.expert_holders(model, int(key.split("/")[2]))
            for place, rank in enumerate(holders):
                begin, end = 0, size
                if kinds == OPTIMIZER:
                    begin = size * place // len(holders)
                    end = size * (place + 1) // len(holders)
                held[rank].append(Piece(key, begin, end))
        return held


GPT_125M = Model("GPT-125M-8E", 12, 768, 8)
GPT_350M = Model("GPT-350M-16E", 24, 1024, 16)
CASES = (
    Case("case 1: 8 GPUs, DP 8, EP 8", 8, 8),
    Case("case 2: 16 GPUs, DP 16, EP 16", 16, 16),
    Case("case 3: 16 GPUs, DP 16, EP 8", 16, 8),
)
