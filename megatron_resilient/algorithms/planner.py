"""A whole plan: replica counts, their placement, and what the placement is worth."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.placement import DEFAULT_EFFORT, Placement, place_replicas
from megatron_resilient.algorithms.recovery_probability import (
    Estimate,
    guaranteed_losses,
    holders,
    recovery_probability,
    survival_probability,
)
from megatron_resilient.algorithms.replication import (
    ReplicaAllocation,
    allocate_replicas,
    slot_imbalance,
)
from megatron_resilient.algorithms.topology import Topology
from megatron_resilient.errors import PlanError

# Losses of up to this many nodes are reported for large clusters, and all for small ones.
_REPORTED_LOSSES = 8
_SMALL_CLUSTER = 16


@dataclass(frozen=True)
class Plan:
    """Replica counts and placement of all layers.

    Attributes:
        allocations: Replica counts of every layer.
        placement: Where the replicas are.
    """

    allocations: tuple[ReplicaAllocation, ...]
    placement: Placement

    @property
    def effective_min_replicas(self) -> int:
        """The minimum of replicas that was kept in all layers."""
        return min(own.effective_min_replicas for own in self.allocations)


@dataclass(frozen=True)
class LayerValue:
    """What the placement of one layer is worth.

    Attributes:
        distinct_nodes: Nodes that hold each expert.
        imbalance: Max/mean tokens per slot, an expert's tokens shared evenly by its replicas.
        recovery: Probability that the layer is recoverable, by the number of nodes lost at once.
    """

    distinct_nodes: tuple[int, ...]
    imbalance: float
    recovery: dict[int, Estimate]


@dataclass(frozen=True)
class PlanValue:
    """What a plan is worth.

    Attributes:
        layers: By layer.
        joint_recovery: Probability that all layers are, by the number of nodes lost at once.
        guaranteed_losses: Any so many nodes may be lost at once.
        survival: Probability that no failure of the topology is fatal; None without a topology.
    """

    layers: tuple[LayerValue, ...]
    joint_recovery: dict[int, Estimate]
    guaranteed_losses: int
    survival: Estimate | None


def make_plan(
    loads: Sequence[Sequence[int | float | Fraction]],
    nodes: int,
    slots_per_node: int,
    *,
    min_replicas: int = 1,
    ranks_per_node: int = 1,
    topology: Topology | None = None,
    max_imbalance: float | None = None,
    effort: int = DEFAULT_EFFORT,
) -> Plan:
    """Plans replica counts and placement of all layers.

    Args:
        loads: Tokens of every expert of every layer in the window; finite and not negative.
        nodes: Number of nodes.
        slots_per_node: Replica slots of a node.
        min_replicas: Fewest replicas of every expert, if the slots suffice.
        ranks_per_node: Ranks of a node; divides `slots_per_node`.
        topology: Failure probabilities of nodes and racks; by default all nodes are alike.
        max_imbalance: See `place_replicas`.
        effort: See `place_replicas`; 0 plans fastest, without proofs.

    Raises:
        UnrecoverablePlanError: Fewer slots than experts.
        PlanError: Other arguments that do not fit together.
    """
    if not loads:
        raise PlanError("no layers to plan")
    allocations = []
    for layer, own in enumerate(loads):
        try:
            allocations.append(allocate_replicas(own, nodes * slots_per_node, min_replicas))
        except PlanError as error:
            raise type(error)(f"layer {layer}: {error}") from None
    placement = place_replicas(
        [own.replicas for own in allocations],
        nodes,
        slots_per_node,
        min_replicas=min(own.effective_min_replicas for own in allocations),
        loads=loads,
        ranks_per_node=ranks_per_node,
        topology=topology,
        max_imbalance=max_imbalance,
        effort=effort,
    )
    return Plan(tuple(allocations), placement)


def value_plan(
    plan: Plan,
    loads: Sequence[Sequence[int | float | Fraction]],
    *,
    topology: Topology | None = None,
    losses: Iterable[int] | None = None,
) -> PlanValue:
    """Computes what a plan is worth.

    Args:
        plan: The plan.
        loads: The loads to judge its balance by.
        topology: To compute the survival probability for.
        losses: Numbers of nodes lost at once; by default all up to 16 nodes, else 1 to 8.
    """
    nodes = plan.placement.slots.shape[1]
    if losses is None:
        losses = range(1, (nodes if nodes <= _SMALL_CLUSTER else _REPORTED_LOSSES) + 1)
    wanted = list(losses)
    layers = []
    fatal_sets: set[int] = set()
    for slots, allocation, own_loads in zip(
        plan.placement.slots, plan.allocations, loads, strict=True
    ):
        held = holders(slots, len(allocation.replicas))
        fatal = node_sets.minimal(node_sets.from_rows(held))
        fatal_sets.update(fatal)
        layers.append(
            LayerValue(
                tuple(held.sum(axis=1).tolist()),
                slot_imbalance(own_loads, allocation.replicas),
                recovery_probability(fatal, nodes, wanted),
            )
        )
    joint = node_sets.minimal(fatal_sets)
    return PlanValue(
        tuple(layers),
        recovery_probability(joint, nodes, wanted),
        guaranteed_losses(joint, nodes),
        None if topology is None else survival_probability(joint, topology),
    )
