"""One order of the nodes for all layers, so that the layers fail together or not at all.

Every layer's design is free to choose which node plays which part. The whole model is recoverable
only if every layer is: it is likely to be when the layers depend on the same nodes. With
independent choices (as in Lazarus, arXiv 2407.04656, which plans every layer by itself) the joint
probability decays with the number of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.block_design import NodeClass
from megatron_resilient.algorithms.loss_tables import LossMeasure, LossTable

# Designs of all layers; entry [layer][class] is a class of nodes.
Designs = Sequence[Sequence[NodeClass]]


@dataclass(frozen=True)
class NodeOrder:
    """Which node plays which part in which layer: a set of nodes per layer and class.

    Sets of one layer are disjoint and cover all nodes (see `node_sets`).
    """

    parts: tuple[tuple[int, ...], ...]

    def holders(self, designs: Designs, layer: int) -> dict[int, int]:
        """Returns the set of nodes that hold each expert of a layer."""
        return holders_by_class(designs[layer], self.parts[layer])

    def fatal_sets(self, designs: Designs) -> list[int]:
        """Returns the minimal sets of nodes whose loss is fatal to some layer."""
        return node_sets.minimal(
            nodes
            for layer in range(len(designs))
            for nodes in self.holders(designs, layer).values()
        )


def holders_by_class(design: Sequence[NodeClass], parts: Sequence[int]) -> dict[int, int]:
    """Returns the union of the parts that hold each expert."""
    found: dict[int, int] = {}
    for own, nodes in zip(design, parts, strict=True):
        for expert in own.experts:
            found[expert] = found.get(expert, 0) | nodes
    return found


def in_line(designs: Designs) -> NodeOrder:
    """Cuts the nodes 0, 1, .. into the classes of every layer, in the order of its design."""
    parts = []
    for design in designs:
        start, own = 0, []
        for node_class in design:
            own.append((1 << node_class.nodes) - 1 << start)
            start += node_class.nodes
        parts.append(tuple(own))
    return NodeOrder(tuple(parts))


def on_common_cores(designs: Designs) -> NodeOrder:
    """Gives the i-th smallest block of every layer a core of nodes that all layers share.

    The core is as large as the smallest i-th block. That block is a fatal set of its layer, and all
    other i-th blocks contain it, so the joint recovery probability is that of one layer whose
    blocks are the cores.
    """
    nodes = sum(own.nodes for own in designs[0])
    blocks = [_blocks(design) for design in designs]
    cores: list[int] = []
    start = 0
    for rank in range(max(map(len, blocks))):
        size = min(
            design[own[rank]].nodes
            for design, own in zip(designs, blocks, strict=True)
            if rank < len(own)
        )
        cores.append((1 << size) - 1 << start)
        start += size
    parts = []
    for design, own in zip(designs, blocks, strict=True):
        chosen = dict(zip(own, cores, strict=False))
        free = (1 << nodes) - 1 & ~sum(chosen.values())
        # Blocks grow by the last nodes; what is in no block takes the first ones, where cores of
        # other layers are.
        for index in own:
            for _ in range(design[index].nodes - chosen[index].bit_count()):
                last = 1 << free.bit_length() - 1
                chosen[index] |= last
                free ^= last
        for index, node_class in enumerate(design):
            if index not in chosen:
                chosen[index] = 0
                for _ in range(node_class.nodes):
                    first = free & -free
                    chosen[index] |= first
                    free ^= first
        parts.append(tuple(chosen[index] for index in range(len(design))))
    return NodeOrder(tuple(parts))


def _blocks(design: Sequence[NodeClass]) -> list[int]:
    """Returns the classes that are all that some expert has, by ascending size."""
    count: dict[int, int] = {}
    for own in design:
        for expert in own.experts:
            count[expert] = count.get(expert, 0) + 1
    alone = [
        index
        for index, own in enumerate(design)
        if any(count[expert] == 1 for expert in own.experts)
    ]
    return sorted(alone, key=lambda index: design[index].nodes)


def exchange_nodes(
    order: NodeOrder,
    designs: Designs,
    table: LossTable,
    measure: LossMeasure,
    *,
    budget: int = 20_000,
) -> NodeOrder:
    """Improves an order by exchanging two nodes in one layer, until no exchange helps.

    Args:
        order: Where to start.
        designs: Designs of the layers.
        table: Of the cluster's nodes.
        measure: Weighs families of losses; what is fatal to some layer should weigh least.
        budget: Exchanges to try; counted, so that all ranks stop at the same point.
    """
    parts = [list(own) for own in order.parts]
    nodes = table.nodes

    def fatal(layer: int) -> int:
        return table.fatal(holders_by_class(designs[layer], parts[layer]).values())

    families = [fatal(layer) for layer in range(len(designs))]
    heaviest = max(map(measure, families))

    def others(layer: int) -> int:
        union = 0
        for index, family in enumerate(families):
            if index != layer:
                union |= family
        return union

    improved = True
    while improved:
        improved = False
        for layer in range(len(designs)):
            rest = others(layer)
            cost = measure(rest | families[layer])
            if cost <= heaviest:  # no order can be better than its worst layer
                return NodeOrder(tuple(map(tuple, parts)))
            where = {
                node: index
                for index, own in enumerate(parts[layer])
                for node in node_sets.members(own)
            }
            for one in range(nodes):
                for other in range(one):
                    if where[one] == where[other]:
                        continue
                    budget -= 1
                    if budget < 0:
                        return NodeOrder(tuple(map(tuple, parts)))
                    both = 1 << one | 1 << other
                    parts[layer][where[one]] ^= both
                    parts[layer][where[other]] ^= both
                    family = fatal(layer)
                    then = measure(rest | family)
                    if then < measure.limit(cost):
                        cost, families[layer], improved = then, family, True
                        where[one], where[other] = where[other], where[one]
                    else:
                        parts[layer][where[one]] ^= both
                        parts[layer][where[other]] ^= both
    return NodeOrder(tuple(map(tuple, parts)))
