"""What a system does with a cluster: which nodes it uses, how fast, and what a loss costs it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_resilient.algorithms.guardians import guardian_shift
from megatron_resilient.errors import PlanError
from megatron_resilient.simulation.costs import GIB, Costs
from megatron_resilient.simulation.placements import (
    Expert,
    in_groups,
    planned,
    stock_group_ranks,
)
from megatron_resilient.simulation.save_bytes import SaveBytes
from megatron_resilient.simulation.systems import System
from megatron_resilient.simulation.workload import Workload

# Of 14 bytes of state a parameter the 2 of bf16 weights.
_WEIGHTS_SHARE = 2 / 14


@dataclass(frozen=True)
class World:
    """Nodes that train together.

    Attributes:
        nodes: by the part of the placement that each has.
        moved: most experts that one rank had to send or get for it, all layers of the loads.
        newcomers: how many of the nodes bring no state.
    """

    nodes: tuple[str, ...]
    moved: int = 0
    newcomers: int = 0


@dataclass(frozen=True)
class Fate:
    """What a loss of nodes does to the state of training.

    Attributes:
        rolls_back: all state goes back to the newest checkpoint.
        experts: that alone come from there, while everything else goes on.
    """

    rolls_back: bool
    experts: tuple[Expert, ...] = ()


class Policy:
    """One system on one cluster.

    Attributes:
        system: which.
        workload: what it trains.
        group_nodes: it uses a multiple of so many nodes.
        least_nodes: with fewer it waits.
        most_nodes: that it can use of the whole cluster.
        placements: of its experts.
        save_bytes: of its checkpoints.
    """

    def __init__(
        self,
        system: System,
        workload: Workload,
        costs: Costs,
        *,
        min_replicas: int = 2,
        exact: bool = False,
    ) -> None:
        """Makes the policy.

        Args:
            system: which.
            workload: what it trains.
            costs: what things cost.
            min_replicas: nodes that ours keeps each expert on, as far as slots suffice.
            exact: ours goes back to a checkpoint as a whole when an expert is gone.
        """
        self.system = system
        self.workload = workload
        self._costs = costs
        self._exact = exact
        self.group_nodes = 1
        if system.base == "ours":
            self.placements = planned(workload, workload.slots_per_rank, min_replicas)
            self._least_slots = workload.slots_per_node
        elif system.base == "no-replicas":
            self.placements = planned(workload, None, 1)
            self._least_slots = workload.slots_per_node
        else:
            ranks = stock_group_ranks(workload)
            self.group_nodes = max(1, ranks // workload.ranks_per_node)
            self.placements = in_groups(workload, self.group_nodes)
            self._least_slots = workload.experts
        self.least_nodes = max(
            self.used(-(-workload.experts // self._least_slots)) or self.group_nodes,
            self.group_nodes * -(-workload.min_nodes // self.group_nodes),
        )
        self.most_nodes = self.used(workload.nodes)
        if self.most_nodes < self.least_nodes:
            raise PlanError(
                f"{system.name} needs {self.least_nodes} nodes for its experts, and there are "
                f"{workload.nodes}: give nodes more slots"
            )
        self.save_bytes = SaveBytes(workload, self.placements, self.most_nodes)
        self._save = costs.our_save if system.is_ours else costs.stock_save
        self._guardian = cache(self._guardian_of_nodes)

    def used(self, nodes: int) -> int:
        """Returns how many of so many nodes train."""
        return nodes // self.group_nodes * self.group_nodes

    def step_seconds(self, nodes: int) -> float:
        """Returns the time of a step on so many nodes."""
        costs, share = self._costs, self._costs.expert_share
        moe = share * self.placements.imbalance(nodes)
        if self.system.overlap:
            moe /= costs.overlap_speedup
        overhead = 1 + costs.resilience_overhead if self.system.is_ours else 1.0
        relative = costs.relative_step(nodes, self.workload.relative_step)
        return costs.step_seconds * relative * (1 - share + moe) * overhead

    @property
    def undisturbed_step_seconds(self) -> float:
        """The time of a step on all nodes, without what being recoverable costs."""
        overhead = 1 + self._costs.resilience_overhead if self.system.is_ours else 1.0
        return self.step_seconds(self.most_nodes) / overhead

    def stall_seconds(self, k: int, nodes: int) -> float:
        """Returns how long training waits for a save with K experts of each layer."""
        return self._save.stall(self.save_bytes.of_rank(k, nodes))

    def persist_seconds(self, k: int, nodes: int) -> float:
        """Returns how long after that the save is durable."""
        return self._save.persist(self.save_bytes.of_rank(k, nodes))

    def fate(self, world: World, lost: Collection[str]) -> Fate:
        """Returns what becomes of training's state when nodes of a world are lost."""
        if not self.system.keeps_state or len(lost) == len(world.nodes):
            return Fate(True)
        parts = [part for part, node in enumerate(world.nodes) if node in lost]
        if self.workload.distributed_optimizer and self._loses_dense(len(world.nodes), parts):
            return Fate(True)
        experts = self.placements.lost_experts(len(world.nodes), parts)
        # Only checkpoints by expert can give one back alone.
        if experts and (self._exact or not self.system.is_ours):
            return Fate(True)
        return Fate(False, tuple(experts))

    def may_restore(self, lost: int) -> bool:
        """Whether the loss of so many nodes at once may need a checkpoint, if all nodes are there.

        A loss that is certainly survived needs none; of others it is not said.
        """
        return lost > 0 and (
            not self.system.keeps_state or lost > self.placements.surely_survived(self.most_nodes)
        )

    def form(self, nodes: Sequence[str], old: World | None, lost: Collection[str]) -> World:
        """Returns the world of the nodes that are there.

        Args:
            nodes: all that are there, those of the old world first, in its order.
            old: the world before; None: nobody has any state.
            lost: nodes of the old world that gave nothing away before they went.
        """
        number = self.used(len(nodes))
        chosen = list(nodes[:number])
        if old is None or not self.system.keeps_state:
            return World(tuple(chosen), 0, number)
        part_of = {node: part for part, node in enumerate(old.nodes)}
        kept = [part_of[node] for node in chosen if node in part_of and node not in lost]
        order, moved = self.placements.move(len(old.nodes), kept, number)
        return World(tuple(chosen[node] for node in order), moved, number - len(kept))

    def recovery_seconds(self, fate: Fate, world: World) -> float:
        """Returns the time from a loss to the first step of the world after it."""
        if self.system.base == "restart":
            return self.start_seconds(world)
        if not self.system.keeps_state:
            return self._costs.in_process_seconds + self._load(world)
        read = self._load(world) if fate.rolls_back or fate.experts else 0.0
        copied = 0.0 if fate.rolls_back else self._refill(world)
        return self._costs.recovery_seconds + read + copied

    def start_seconds(self, world: World) -> float:
        """Returns the time that a new start from a checkpoint takes."""
        costs = self._costs
        fixed = costs.restart_seconds + costs.restart_seconds_per_node * len(world.nodes)
        return fixed + self._load(world)

    def join_seconds(self, world: World) -> float:
        """Returns how long nodes wait that were there before, when others join."""
        if not self.system.keeps_state:
            return self.recovery_seconds(Fate(False), world)
        return self._costs.join_seconds + self._refill(world)

    @property
    def join_window_seconds(self) -> float:
        """How long after the last arrival nodes are taken in."""
        return self._costs.join_window_seconds

    def _load(self, world: World) -> float:
        ranks = max(1, len(world.nodes)) * self.workload.ranks_per_node
        return self._costs.load_seconds_per_gib * self.workload.full_bytes / ranks / GIB

    def _refill(self, world: World) -> float:
        own = self.workload
        moved = own.expert_bytes * world.moved * own.moe_layers / len(own.loads)
        if world.newcomers:
            # With the distributed optimizer a rank gets weights, and next to nothing of the rest.
            part = _WEIGHTS_SHARE if own.distributed_optimizer else 1.0
            moved += own.dense_bytes * part / own.ranks_per_node
        return self._costs.refill_seconds_per_gib * moved / GIB

    def _loses_dense(self, nodes: int, parts: Collection[int]) -> bool:
        """Whether a rank is lost together with the guardian of its dense optimizer state."""
        gone = set(parts)
        shift = self._guardian(nodes)
        if shift is None:
            return bool(gone)
        ranks, own = nodes * self.workload.ranks_per_node, self.workload.ranks_per_node
        return any(
            ((rank + shift) % ranks) // own in gone
            for part in gone
            for rank in range(part * own, (part + 1) * own)
        )

    def _guardian_of_nodes(self, nodes: int) -> int | None:
        own = self.workload.ranks_per_node
        return guardian_shift([str(rank // own) for rank in range(nodes * own)])
