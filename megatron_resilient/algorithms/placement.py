"""Which node and rank holds which replicas, so that as few losses of nodes as possible are fatal.

A node is what fails. It has g ranks with s slots each; replicas of an expert are spread over nodes
first, and inside a node over ranks such that ranks expect about the same number of tokens.

One layer is designed by `layer_design` (maximum rank overlap where that is optimal, open blocks and
a search where it is not). The layers then share one order of the nodes (`node_order`), and if nodes
differ in how likely they fail, the nodes are chosen to fit (`topology_fit`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import numpy as np

from megatron_resilient.algorithms import (
    layer_design,
    loss_sweep,
    node_order,
    node_sets,
    topology_fit,
)
from megatron_resilient.algorithms.block_design import block_design
from megatron_resilient.algorithms.layer_design import LayerDesign
from megatron_resilient.algorithms.layer_plan import LayerPlan
from megatron_resilient.algorithms.loss_tables import CountMeasure, LossTable, ProbabilityMeasure
from megatron_resilient.algorithms.node_order import NodeOrder
from megatron_resilient.algorithms.placement_search import SearchResult, search_placement
from megatron_resilient.algorithms.recovery_probability import survival_probability
from megatron_resilient.algorithms.replication import exact_loads
from megatron_resilient.algorithms.slot_layout import IntArray
from megatron_resilient.algorithms.topology import Topology
from megatron_resilient.errors import PlanError

# Sets of nodes and exchanges that may be weighed for one plan, over all layers.
DEFAULT_EFFORT = 20_000

# Clusters whose nodes differ are searched to the end up to this size: here no nodes are alike.
_MAX_SEARCHED_UNLIKE_NODES = 8

# Of those, the exchanges of nodes.
_MAX_EXCHANGES = 20_000

# Joint probabilities of two orders of the nodes are compared for up to this many lost nodes.
_COMPARED_LOSSES = 16


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
        _order_nodes(layers, effort, may_fall_back=max_imbalance is None)
    if topology is not None and not topology.is_uniform:
        _fit(layers, topology.simplified(), effort, seed, search=max_imbalance is None)
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


class _Judge:
    """Compares orders of the nodes by the losses that are fatal to some layer.

    What exceeds the number of fatal losses of the reference, for any number of nodes lost, counts
    most; then fatal losses of one node, of two, and so on.
    """

    def __init__(self, nodes: int, reference: Sequence[int]) -> None:
        self._nodes = nodes
        self._most = min(nodes, _COMPARED_LOSSES)
        self._table = LossTable(nodes) if nodes <= layer_design.MAX_SEARCHED_NODES else None
        self._ceilings = self._fatal_losses(reference)
        if self._table is not None:
            self._measure = CountMeasure(self._table, self._ceilings)

    def cost(self, fatal_sets: Sequence[int]) -> tuple[int, list[int]]:
        counts = self._fatal_losses(fatal_sets)
        return layer_design.excess(counts, self._ceilings), counts

    def improve(self, order: NodeOrder, designs: node_order.Designs, effort: int) -> NodeOrder:
        if self._table is None:
            return order
        return node_order.exchange_nodes(
            order, designs, self._table, self._measure, budget=min(effort, _MAX_EXCHANGES)
        )

    def _fatal_losses(self, fatal_sets: Sequence[int]) -> list[int]:
        survivable = loss_sweep.count_survivable(fatal_sets, self._nodes, self._most)
        if survivable is None:  # too many fatal sets are open at once: take the worst for granted
            survivable = [0] * (self._most + 1)
        return [comb(self._nodes, k) - count for k, count in enumerate(survivable)]


def _order_nodes(layers: Sequence[LayerPlan], effort: int, *, may_fall_back: bool) -> None:
    """Gives all layers one order of the nodes.

    Jointly not below the paper's plan in one order, for any number of losses compared. If even the
    best order found is, the paper's plan is taken for all layers (never seen to be needed).
    """
    nodes = layers[0].nodes
    designs = [layer.classes for layer in layers]
    paper = [block_design(layer.replicas, nodes, layer.slots_per_node) for layer in layers]
    judge = _Judge(nodes, node_order.in_line(paper).fatal_sets(paper))

    def best_order(of: node_order.Designs) -> tuple[tuple[int, list[int]], NodeOrder]:
        orders = [
            judge.improve(order, of, effort)
            for order in (node_order.on_common_cores(of), node_order.in_line(of))
        ]
        return min(((judge.cost(o.fatal_sets(of)), o) for o in orders), key=lambda found: found[0])

    cost, order = best_order(designs)
    allowed = list(map(LayerPlan.allowed, layers, paper))
    if cost[0] and may_fall_back and None not in allowed:
        for layer, classes in zip(layers, allowed, strict=True):
            assert classes is not None
            layer.adopt_weaker(classes, "blocks")
        _, order = best_order([layer.classes for layer in layers])
    for layer, parts in zip(layers, order.parts, strict=True):
        layer.seat(parts)


def _fit(
    layers: Sequence[LayerPlan], topology: Topology, effort: int, seed: int, *, search: bool
) -> None:
    """Chooses nodes that fit the topology; searches for better holders in small clusters."""
    fatal = node_sets.minimal(own for layer in layers for own in layer.holders)
    fit = topology_fit.fit_to_topology(
        fatal, topology, seed=seed, budget=min(effort, _MAX_EXCHANGES)
    )
    for layer in layers:
        layer.seat(
            [
                node_sets.from_members(fit.node_of[position] for position in node_sets.members(own))
                for own in layer.parts
            ]
        )
        layer.method = f"{layer.method}; {fit.method}"
        layer.optimal = None
    if search and topology.nodes <= _MAX_SEARCHED_UNLIKE_NODES:
        _search_holders(layers, topology, effort)
    for layer in layers:
        bound = topology_fit.survival_bound(
            layer.replicas[0], len(layer.replicas), layer.slots_per_node, topology
        )
        reached = survival_probability(layer.holders, topology)
        if reached.standard_error < 1e-12 and reached.value >= bound - 1e-12:
            layer.optimal = True


def _search_holders(layers: Sequence[LayerPlan], topology: Topology, effort: int) -> None:
    """Improves the joint survival, one layer after another, until no layer can improve it alone."""
    table = LossTable(topology.nodes)
    measure = ProbabilityMeasure(topology)
    node_kinds = list(zip(topology.failure_probability, topology.rack_of, strict=True))

    def search(layer: LayerPlan, rest: int, cost: float, kinds: Sequence[Hashable]) -> SearchResult:
        nonlocal effort
        result = search_placement(
            layer.replicas,
            layer.slots_per_node,
            table,
            measure,
            min_distinct=layer.min_distinct,
            kinds=kinds,
            known_cost=cost,
            already_fatal=rest,
            budget=max(effort, 0),
        )
        effort -= result.effort
        return result

    # Each layer by itself: its optimum, which the other layers may keep it from.
    alone = []
    for layer in layers:
        cost = measure(table.fatal(layer.holders))
        result = search(layer, 0, cost, node_kinds)
        holders = result.holders or layer.holders
        alone.append((holders, measure(table.fatal(holders)), result.complete))
    together = measure(table.fatal(own for layer in layers for own in layer.holders))
    if measure(table.fatal(own for holders, _, _ in alone for own in holders)) < together:
        for layer, (holders, _, _) in zip(layers, alone, strict=True):
            if holders != layer.holders:
                layer.hold(holders, "search")
    improved = len(layers) > 1
    while improved and effort > 0:
        improved = False
        for layer in layers:
            rest = table.fatal(
                own for other in layers if other is not layer for own in other.holders
            )
            cost = measure(rest | table.fatal(layer.holders))
            result = search(layer, rest, cost, range(topology.nodes))
            if result.holders is not None:
                layer.hold(result.holders, "search")
                improved = True
    for layer, (holders, best, complete) in zip(layers, alone, strict=True):
        rest = table.fatal(own for other in layers if other is not layer for own in other.holders)
        joint = measure(rest | table.fatal(layer.holders))
        if holders != layer.holders and measure(rest | table.fatal(holders)) <= joint:
            layer.hold(holders, "search")  # its own optimum, which costs the others nothing
        if measure(table.fatal(layer.holders)) >= best * (1 + 1e-9) and best:
            layer.optimal = False
        elif complete:
            layer.optimal = True
