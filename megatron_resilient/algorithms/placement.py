"""Which node and rank holds which replicas, so that as few losses of nodes as possible are fatal.

A node is what fails. It has g ranks with s slots each; replicas of an expert are spread over nodes
first, and inside a node over ranks such that ranks expect about the same number of tokens.

One layer is designed by `layer_design` (maximum rank overlap where that is optimal, open blocks and
a search where it is not). The layers then share one order of the nodes (`joint_order`), and if
nodes differ in how likely they fail, the nodes are chosen to fit (`unlike_nodes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_resilient.algorithms import layer_design
from megatron_resilient.algorithms.joint_order import order_nodes
from megatron_resilient.algorithms.layer_design import LayerDesign
from megatron_resilient.algorithms.layer_plan import LayerPlan
from megatron_resilient.algorithms.replication import exact_loads
from megatron_resilient.algorithms.slot_layout import IntArray
from megatron_resilient.algorithms.topology import Topology
from megatron_resilient.algorithms.unlike_nodes import fit_layers
from megatron_resilient.errors import PlanError

# Sets of nodes that may be weighed for one plan, over all layers.
DEFAULT_EFFORT = 20_000


@dataclass(frozen=True)
class Placement:
    """Where all replicas of all layers are.

    Attributes:
        slots: Expert in every slot, [layers, nodes, slots per node]. Rank i of a node has the slots
            [i * s, (i + 1) * s), s = slots per node / ranks per node; they ascend within a rank.
        ranks_per_node: Ranks of a node.
        methods: How each layer was placed.
        optimal: Whether each layer is: no placement of its replicas has fewer fatal losses, of the
            smallest number of lost nodes where the numbers differ (with a topology: a lower
            probability of a fatal loss). True if proven; False if a better one is known, for some
            number of lost nodes, but was given up (for the sake of other layers, of balance, or of
            larger losses); None if not known.
    """

    slots: IntArray
    ranks_per_node: int
    methods: tuple[str, ...]
    optimal: tuple[bool | None, ...]

    @property
    def by_rank(self) -> IntArray:
        """The slots as [layers, ranks, slots per rank]."""
        layers, nodes, slots_per_node = self.slots.shape
        ranks = nodes * self.ranks_per_node
        return self.slots.reshape(layers, ranks, slots_per_node // self.ranks_per_node)


def place_replicas(
    replicas: Sequence[Sequence[int]],
    nodes: int,
    slots_per_node: int,
    *,
    min_replicas: int = 1,
    loads: Sequence[Sequence[int | float | Fraction]] | None = None,
    ranks_per_node: int = 1,
    topology: Topology | None = None,
    max_imbalance: float | None = None,
    effort: int = DEFAULT_EFFORT,
    seed: int = 0,
) -> Placement:
    """Places the replicas of all layers.

    For nodes that are all alike, as few sets of one lost node as possible are fatal, then of two,
    and so on; all small instances searched by brute force have placements that are best for every
    number of losses at once. Never worse than maximum rank overlap (Lazarus, arXiv 2407.04656,
    section 4.1), for any number of losses, and better where its last block is truncated. Every
    expert is on at least min(r_e, min_replicas, N) distinct nodes.

    With a topology, the probability that all experts of all layers survive is as high as possible.

    The same arguments give the same placement on every rank: no clock, no unseeded choice.

    Args:
        replicas: Replica counts of every expert of every layer; each layer's sum to
            nodes * slots_per_node. Layers may differ in their number of experts.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.
        min_replicas: Distinct nodes that every expert should be on (it may have fewer replicas).
        loads: Tokens of every expert of every layer, to balance nodes and ranks by; by default in
            proportion to the replicas.
        ranks_per_node: Ranks g of a node; divides slots_per_node.
        topology: Failure probabilities of nodes and racks; by default all nodes are alike.
        max_imbalance: Highest max/mean tokens per rank to accept in a layer, when tokens are
            assigned to the emptiest ranks. Where the most survivable placement exceeds it, slots
            are kept free on all nodes for replicas of much-used experts, which may cost
            survivable losses. By default survival alone decides.
        effort: Limits the search for proofs and improvements.
        seed: Of the local search for a topology.

    Raises:
        PlanError: Arguments that do not fit together.
    """
    _check(replicas, nodes, slots_per_node, ranks_per_node, loads, topology)
    if max_imbalance is not None and not max_imbalance >= 1:
        raise PlanError(f"max_imbalance is {max_imbalance}: max/mean cannot be below 1")
    layers = [
        LayerPlan(
            [int(count) for count in own], exact_loads(by_load), nodes, slots_per_node, min_replicas
        )
        for own, by_load in zip(replicas, replicas if loads is None else loads, strict=True)
    ]
    _design(layers, effort)
    if max_imbalance is not None:
        for layer in layers:
            layer.balance(max_imbalance, ranks_per_node)
    if len(layers) > 1 and nodes > 1:
        order_nodes(layers, may_fall_back=max_imbalance is None)
    if topology is not None and not topology.is_uniform:
        fit_layers(layers, topology.simplified(), effort, seed, search=max_imbalance is None)
    return Placement(
        np.stack([layer.slots(ranks_per_node) for layer in layers]),
        ranks_per_node,
        tuple(layer.method for layer in layers),
        tuple(layer.optimal for layer in layers),
    )


def _check(
    replicas: Sequence[Sequence[int]],
    nodes: int,
    slots_per_node: int,
    ranks_per_node: int,
    loads: Sequence[Sequence[int | float | Fraction]] | None,
    topology: Topology | None,
) -> None:
    if not replicas:
        raise PlanError("no layers to place")
    if nodes < 1 or slots_per_node < 1:
        raise PlanError(f"{nodes} nodes of {slots_per_node} slots: both must be at least 1")
    if ranks_per_node < 1 or slots_per_node % ranks_per_node:
        raise PlanError(
            f"{slots_per_node} slots per node cannot be shared evenly by {ranks_per_node} ranks"
        )
    if topology is not None and topology.nodes != nodes:
        raise PlanError(f"the topology describes {topology.nodes} nodes, the plan has {nodes}")
    if loads is not None and len(loads) != len(replicas):
        raise PlanError(f"loads of {len(loads)} layers, replicas of {len(replicas)}")
    for layer, own in enumerate(replicas):
        if min(own, default=0) < 1:
            raise PlanError(f"layer {layer}: every expert needs at least one replica")
        if sum(own) != nodes * slots_per_node:
            raise PlanError(
                f"layer {layer}: {sum(own)} replicas for {nodes} * {slots_per_node} slots"
            )
        if loads is not None and len(loads[layer]) != len(own):
            raise PlanError(
                f"layer {layer}: loads of {len(loads[layer])} experts, replicas of {len(own)}"
            )


def _design(layers: Sequence[LayerPlan], effort: int) -> None:
    """Designs every layer by itself; layers with the same counts share a design."""
    distinct = {(layer.replicas, layer.min_distinct) for layer in layers}
    designs: dict[tuple[tuple[int, ...], tuple[int, ...]], LayerDesign] = {}
    for layer in layers:
        key = layer.replicas, layer.min_distinct
        if key not in designs:
            budget = effort // (len(distinct) - len(designs))
            designs[key] = layer_design.design_layer(
                layer.replicas, layer.nodes, layer.slots_per_node, layer.min_distinct, budget
            )
            effort -= designs[key].effort
        layer.adopt(designs[key])
