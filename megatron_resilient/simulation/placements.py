"""Which experts nodes hold in worlds of any size, by the planning code that training uses.

Plans are made when they are asked for and kept: a month of failures comes back to the same sizes.
"""

from collections.abc import Callable, Collection
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.migration import EMPTY, plan_migration
from megatron_resilient.algorithms.rank_plan import plan_layers
from megatron_resilient.algorithms.recovery_probability import holders
from megatron_resilient.algorithms.token_assignment import least_imbalance
from megatron_resilient.errors import PlanError
from megatron_resilient.simulation.workload import Workload

IntArray = npt.NDArray[np.int64]

# Up to this size each world is planned, and nodes are mapped to their new parts exactly. Above it
# balance and moves are those of the next size of a series in which each is 1.06 times the last.
EXACT_NODES = 64
_SIZE_RATIO = 1.06

Expert = tuple[int, int]  # (layer of the loads, logical expert)


class Placements:
    """Placements of one kind for any number of nodes.

    Attributes:
        ranks_per_node: ranks of a node.
        experts: logical experts of a layer.
        loads: that they are made for and judged by, [layers][experts].
        slots: nodes -> expert in every slot, [layers, ranks, slots per rank].
        surely_survived: nodes -> any so many of them may be lost, without looking at a plan.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Callable[[int], IntArray],
        surely_survived: Callable[[int], int],
        typical_moves: Callable[[int], int] | None = None,
    ) -> None:
        """Takes the way to plan.

        Args:
            workload: what is placed.
            plan: nodes -> expert in every slot, [layers, ranks, slots per rank].
            surely_survived: nodes -> any so many of them may be lost, which saves planning.
            typical_moves: nodes -> experts that a rank gets when one is lost; None: planned.
        """
        self.ranks_per_node = workload.ranks_per_node
        self.experts = workload.experts
        self.loads = workload.loads
        self.slots: Callable[[int], IntArray] = cache(plan)
        self.surely_survived = surely_survived
        self._imbalance = cache(self._mean_imbalance)
        self._typical = cache(self._typical_moves) if typical_moves is None else typical_moves

    def imbalance(self, nodes: int) -> float:
        """Returns max/mean tokens per rank that the placement allows, in the mean over layers."""
        return self._imbalance(_near(nodes))

    def lost_experts(self, nodes: int, lost: Collection[int]) -> list[Expert]:
        """Returns the experts that no node holds any more.

        Args:
            nodes: of the world.
            lost: parts of the nodes that are gone, 0 to nodes - 1.
        """
        if nodes > EXACT_NODES and len(lost) <= self.surely_survived(nodes):
            return []
        alive = np.ones(nodes, dtype=np.bool_)
        alive[list(lost)] = False
        found = []
        for layer, slots in enumerate(self.slots(nodes)):
            held = holders(slots.reshape(nodes, -1), self.experts)
            gone = np.flatnonzero(~held[:, alive].any(axis=1))
            found += [(layer, int(expert)) for expert in gone]
        return found

    def move(self, before: int, kept: list[int], after: int) -> tuple[list[int], int]:
        """Fits a new world to the nodes that are left of an old one.

        Args:
            before: nodes of the old world.
            kept: its parts that the first nodes of the new world have; the others are empty.
            after: nodes of the new world.

        Returns:
            (for each part of the new world the node that takes it, most experts that one rank
            sends or gets, all layers of the loads together).
        """
        if max(before, after) > EXACT_NODES:
            return list(range(after)), self._typical(_near(after))
        target, old = self.slots(after), self.slots(before)
        layers, _, slots = old.shape
        held = np.full((layers, after * self.ranks_per_node, slots), EMPTY, dtype=np.int64)
        by_node = old.reshape(layers, before, self.ranks_per_node, slots)
        rows = by_node[:, kept].reshape(layers, -1, slots)
        held[:, : rows.shape[1]] = rows
        migration = plan_migration(held, target, self.ranks_per_node)
        ranks = after * self.ranks_per_node
        got = np.bincount(migration.fetches.destination, minlength=ranks)
        most = max(int(migration.sent_by().max(initial=0)), int(got.max(initial=0)))
        return migration.node_of.tolist(), most

    def _mean_imbalance(self, nodes: int) -> float:
        slots = self.slots(nodes)
        each = [least_imbalance(row, own) for row, own in zip(self.loads, slots, strict=True)]
        return float(np.mean(each))

    def _typical_moves(self, nodes: int) -> int:
        """Returns the moves after the loss of one node, planned without mapping nodes exactly."""
        fewer = max(1, nodes - 1)
        before = self.slots(nodes)[:, (nodes - fewer) * self.ranks_per_node :]
        migration = plan_migration(before, self.slots(fewer), self.ranks_per_node)
        ranks = fewer * self.ranks_per_node
        got = np.bincount(migration.fetches.destination, minlength=ranks)
        return max(int(migration.sent_by().max(initial=0)), int(got.max(initial=0)))


# Systems that differ in other things share their plans.
@lru_cache(maxsize=4)
def planned(workload: Workload, slots_per_rank: int | None, min_replicas: int) -> Placements:
    """Returns our placements.

    Args:
        workload: what is placed.
        slots_per_rank: slots of each rank; None: as few as the experts need.
        min_replicas: nodes that each expert should be on, as far as slots suffice.
    """
    ranks_per_node, experts = workload.ranks_per_node, workload.experts

    def plan(nodes: int) -> IntArray:
        ranks = nodes * ranks_per_node
        slots = -(-experts // ranks) if slots_per_rank is None else slots_per_rank
        layers = plan_layers(workload.loads, ranks, ranks_per_node, slots, min_replicas)
        return np.array(layers, dtype=np.int64)

    def surely_survived(nodes: int) -> int:
        slots = nodes * ranks_per_node * (slots_per_rank or 1)
        return min(min_replicas, slots // experts, nodes) - 1

    return Placements(workload, plan, surely_survived)


@lru_cache(maxsize=4)
def in_groups(workload: Workload, group_nodes: int) -> Placements:
    """Returns stock's placements: groups of nodes, each with all experts once, in their order.

    Args:
        workload: what is placed.
        group_nodes: nodes of an expert-parallel group.
    """
    experts, ranks_per_node = workload.experts, workload.ranks_per_node
    group_ranks = stock_group_ranks(workload)
    group = np.arange(experts, dtype=np.int64).reshape(group_ranks, -1)
    # A group that is smaller than a node is in it several times.
    times = group_nodes * ranks_per_node // group_ranks

    def plan(nodes: int) -> IntArray:
        world = np.tile(group, (nodes // group_nodes * times, 1))
        return np.stack([world] * len(workload.loads))

    per_rank = experts // group_ranks * len(workload.loads)
    return Placements(
        workload, plan, lambda nodes: nodes // group_nodes - 1, lambda nodes: per_rank
    )


def stock_group_ranks(workload: Workload) -> int:
    """Returns the ranks of stock's smallest expert-parallel group that memory has room for.

    Its size divides the number of experts, and fits nodes: it divides a node's ranks, or is a
    multiple of them.

    Raises:
        PlanError: there is none.
    """
    own = workload.ranks_per_node
    for ranks in range(1, workload.experts + 1):
        fits = own % ranks == 0 or ranks % own == 0
        has_room = workload.experts <= ranks * workload.slots_per_rank
        if fits and has_room and workload.experts % ranks == 0:
            return ranks
    raise PlanError(
        f"stock has no expert-parallel group for {workload.experts} experts on nodes of {own} "
        f"ranks with {workload.slots_per_rank} slots each, since its size must divide the experts, "
        "and fill nodes or a part of one: give nodes more slots, or name others with --system"
    )


def _near(nodes: int) -> int:
    """Returns the size itself where worlds are planned exactly, else one that stands for it."""
    if nodes <= EXACT_NODES:
        return nodes
    near = float(EXACT_NODES)
    while round(near * _SIZE_RATIO) <= nodes:
        near *= _SIZE_RATIO
    return round(near)
