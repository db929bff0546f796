"""One order of the nodes for the plans of all layers."""

from collections.abc import Sequence
from math import comb

from megatron_resilient.algorithms import layer_design, loss_sweep, node_order
from megatron_resilient.algorithms.block_design import block_design
from megatron_resilient.algorithms.layer_plan import LayerPlan
from megatron_resilient.algorithms.loss_tables import CountMeasure, LossTable
from megatron_resilient.algorithms.node_order import NodeOrder

# Two orders are compared by losses of up to this many nodes.
_COMPARED_LOSSES = 16

# Exchanges of two nodes to try in a small cluster.
_MAX_EXCHANGES = 5_000


def order_nodes(layers: Sequence[LayerPlan], *, may_fall_back: bool) -> None:
    """Gives all layers one order of the nodes.

    Jointly not below the paper's plan (Lazarus, arXiv 2407.04656, section 4.1) in one order, for
    any number of losses compared.

    Args:
        layers: The plans; they are seated on their nodes.
        may_fall_back: Whether the paper's plan is to be taken for all layers if the best order
            found is below it for some number of losses.
    """
    nodes = layers[0].nodes
    designs = [layer.classes for layer in layers]
    paper = [block_design(layer.replicas, nodes, layer.slots_per_node) for layer in layers]
    judge = _Judge(nodes, node_order.in_line(paper).fatal_sets(paper))

    def best_order(of: node_order.Designs) -> tuple[tuple[int, list[int]], NodeOrder]:
        orders = [
            judge.improve(order, of)
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

    def improve(self, order: NodeOrder, designs: node_order.Designs) -> NodeOrder:
        if self._table is None:
            return order
        return node_order.exchange_nodes(
            order, designs, self._table, self._measure, budget=_MAX_EXCHANGES
        )

    def _fatal_losses(self, fatal_sets: Sequence[int]) -> list[int]:
        survivable = loss_sweep.count_survivable(fatal_sets, self._nodes, self._most)
        if survivable is None:  # too many fatal sets are open at once: take the worst for granted
            survivable = [0] * (self._most + 1)
        return [comb(self._nodes, k) - count for k, count in enumerate(survivable)]
