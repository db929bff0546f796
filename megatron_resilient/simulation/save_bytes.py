"""How many bytes the rank with most of them writes in a save, by the plan that saves follow."""

from functools import cache

from megatron_resilient.algorithms.expert_selection import select
from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.algorithms.write_plan import plan_writes
from megatron_resilient.simulation.placements import Placements
from megatron_resilient.simulation.workload import Workload

# Planned for so many ranks; more of them write their mean, which a plan comes to within 1 %
# wherever state has as many holders as then.
_PLANNED_RANKS = 128
# Of a rotation of partial saves the first ones stand for all.
_PLANNED_SAVES = 8
# Bytes are counted in units: pieces are whole numbers, and only proportions matter.
_UNITS = 1 << 20


class SaveBytes:
    """Bytes of saves, by K."""

    def __init__(self, workload: Workload, placements: Placements, nodes: int) -> None:
        """Looks at the placement of so many nodes."""
        self._workload = workload
        self._placements = placements
        self._nodes = nodes
        self._over_mean = cache(self._bottleneck)

    def total(self, k: int) -> float:
        """Returns the bytes of a save with K experts of each layer."""
        own = self._workload
        return own.dense_bytes + own.moe_layers * k * own.expert_bytes

    def of_rank(self, k: int, nodes: int) -> float:
        """Returns the bytes of the rank with most, in the mean over saves."""
        ranks = max(1, nodes) * self._workload.ranks_per_node
        return self.total(k) / ranks * self._over_mean(k)

    def _bottleneck(self, k: int) -> float:
        own = self._workload
        ranks = self._nodes * own.ranks_per_node
        if ranks > _PLANNED_RANKS or not self.total(k):
            return 1.0
        saves = range(min(-(-own.experts // k), _PLANNED_SAVES))
        each = [self._planned(ranks, k, save) for save in saves]
        return sum(each) / len(each)

    def _planned(self, ranks: int, k: int, save: int) -> float:
        """Returns the most over the mean of the bytes that ranks write in one save."""
        own = self._workload
        layers = len(own.loads)
        chosen = select("sequential", save, layers, own.experts, k)
        unit = self.total(own.experts) / _UNITS
        expert = round(own.expert_bytes * own.moe_layers / layers / unit)
        dense = round(own.dense_bytes / unit)
        held: list[list[Piece]] = [[] for _ in range(ranks)]
        for layer, slots in enumerate(self._placements.slots(self._nodes).tolist()):
            for rank, experts in enumerate(slots):
                for number in sorted(set(experts).intersection(chosen[layer])):
                    held[rank].append(Piece(f"expert/{layer}/{number}/0/state", 0, expert))
        for pieces in held:
            pieces.append(Piece("dense/0.0/state", 0, dense))
        keys = {piece.key for pieces in held for piece in pieces if piece.size}
        return plan_writes(held, dict.fromkeys(keys, 1)).bottleneck
