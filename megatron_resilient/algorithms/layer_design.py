"""The best design of one layer whose nodes are all alike, and whether it is proven to be best."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_resilient.algorithms import block_design, loss_sweep, node_sets
from megatron_resilient.algorithms.block_design import NodeClass
from megatron_resilient.algorithms.loss_tables import CountMeasure, LossTable
from megatron_resilient.algorithms.placement_search import search_placement
from megatron_resilient.algorithms.slot_layout import fill_nodes

# Clusters up to this size are searched to the end where no theorem applies.
MAX_SEARCHED_NODES = 12

# Larger clusters: designs are compared by losses of up to this many nodes.
_COMPARED_LOSSES = 16


@dataclass(frozen=True)
class LayerDesign:
    """A design of one layer.

    Attributes:
        classes: Which nodes hold which experts; experts are positions in the ascending order of
            replica counts.
        method: How it was made: nested, blocks, open blocks, even spread or search.
        optimal: Whether no placement survives more losses, for any number of lost nodes: True if
            proven, None if not known.
        effort: What the proof has cost, in sets of nodes weighed.
    """

    classes: tuple[NodeClass, ...]
    method: str
    optimal: bool | None
    effort: int = 0


def design_layer(
    replicas: Sequence[int],
    nodes: int,
    slots_per_node: int,
    min_distinct: Sequence[int],
    budget: int,
) -> LayerDesign:
    """Chooses the design that survives most losses, those of the fewest nodes first.

    Args:
        replicas: Replica counts in ascending order, each at least 1; their sum is
            nodes * slots_per_node.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.
        min_distinct: Fewest distinct nodes for every expert; min(r_e, f, N) is always possible.
        budget: Sets of nodes to weigh at most for a proof.
    """
    blocks = block_design.block_design(replicas, nodes, slots_per_node)
    if block_design.is_block_optimal(replicas, nodes, slots_per_node) and reaches(
        blocks, replicas, slots_per_node, min_distinct
    ):
        return LayerDesign(blocks, "nested" if len(replicas) <= slots_per_node else "blocks", True)
    candidates = [(blocks, "blocks"), (even_spread(replicas, nodes), "even spread")]
    opened = block_design.open_block_design(replicas, nodes, slots_per_node)
    if opened is not None:
        candidates.insert(0, (opened, "open blocks"))
    allowed = [
        (classes, method)
        for classes, method in candidates
        if reaches(classes, replicas, slots_per_node, min_distinct)
    ]
    classes, method = min(allowed, key=lambda candidate: weakness(candidate[0], nodes))
    if nodes > MAX_SEARCHED_NODES:
        return LayerDesign(classes, method, None)
    return _prove(classes, method, replicas, slots_per_node, min_distinct, budget)


def reserved_design(
    replicas: Sequence[int], nodes: int, slots_per_node: int, reserved: int
) -> tuple[NodeClass, ...] | None:
    """Returns a design that leaves `reserved` slots of every node to leftover replicas.

    Leftover replicas are those of much-used experts. Where every node has some, tokens can be
    moved away from nodes that are full of them to nodes that hold little-used experts.
    """
    slots = slots_per_node - reserved
    if slots < 1 or nodes * slots < len(replicas):
        return None
    if len(replicas) <= slots or sum(replicas[::slots]) <= nodes:
        return block_design.block_design(replicas, nodes, slots)
    return block_design.open_block_design(replicas, nodes, slots)


def even_spread(replicas: Sequence[int], nodes: int) -> tuple[NodeClass, ...]:
    """Deals replicas to the nodes in turn, so that every expert is on min(r_e, N) distinct nodes.

    This shows that so many are always possible; as a design it is rarely good.
    """
    held: list[list[int]] = [[] for _ in range(nodes)]
    slot = 0
    for expert, count in enumerate(replicas):
        for offset in range(min(count, nodes)):
            held[(slot + offset) % nodes].append(expert)
        slot += count
    return classes_of(held)


def classes_of(held: Iterable[Sequence[int]]) -> tuple[NodeClass, ...]:
    """Groups nodes that hold the same experts."""
    count: dict[tuple[int, ...], int] = {}
    for experts in held:
        key = tuple(experts)
        count[key] = count.get(key, 0) + 1
    return tuple(NodeClass(nodes, experts) for experts, nodes in count.items())


def holders_in_line(classes: Sequence[NodeClass]) -> list[int]:
    """Returns the nodes that hold each expert when the classes take the nodes 0, 1, .. in turn."""
    found: dict[int, int] = {}
    start = 0
    for own in classes:
        nodes = (1 << own.nodes) - 1 << start
        for expert in own.experts:
            found[expert] = found.get(expert, 0) | nodes
        start += own.nodes
    return [found[expert] for expert in sorted(found)]


def reaches(
    classes: Sequence[NodeClass],
    replicas: Sequence[int],
    slots_per_node: int,
    min_distinct: Sequence[int],
) -> bool:
    """Whether every expert gets its minimum of distinct nodes, leftover replicas included."""
    holders = holders_in_line(classes)
    if all(own.bit_count() >= least for own, least in zip(holders, min_distinct, strict=True)):
        return True
    nodes = sum(own.nodes for own in classes)
    held = node_sets.to_rows(holders, nodes)
    slots = fill_nodes(held, replicas, np.zeros(len(replicas), dtype=np.int64), slots_per_node)
    distinct = [len(np.flatnonzero((slots == e).any(axis=1))) for e in range(len(replicas))]
    return all(own >= least for own, least in zip(distinct, min_distinct, strict=True))


def weakness(classes: Sequence[NodeClass], nodes: int) -> tuple[list[int], list[int]]:
    """Returns what to compare designs by: fatal losses by size, then how small fatal sets are."""
    fatal = node_sets.minimal(holders_in_line(classes))
    most = min(nodes, _COMPARED_LOSSES)
    survivable = loss_sweep.count_survivable(fatal, nodes, most)
    if survivable is None:  # too many fatal sets are open at once: count nothing in its favour
        survivable = [0] * (most + 1)
    return [-count for count in survivable], [-own.bit_count() for own in fatal]


def _prove(
    classes: tuple[NodeClass, ...],
    method: str,
    replicas: Sequence[int],
    slots_per_node: int,
    min_distinct: Sequence[int],
    budget: int,
) -> LayerDesign:
    """Searches for a better placement; there is none if the search ends within its budget."""
    table = LossTable(sum(own.nodes for own in classes))
    measure = CountMeasure(table)
    result = search_placement(
        replicas,
        slots_per_node,
        table,
        measure,
        min_distinct=min_distinct,
        kinds=(0,) * table.nodes,
        known_cost=measure(table.fatal(holders_in_line(classes))),
        budget=budget,
    )
    if result.holders is not None:
        held = [
            tuple(e for e, own in enumerate(result.holders) if own >> node & 1)
            for node in range(table.nodes)
        ]
        classes, method = classes_of(held), "search"
    return LayerDesign(classes, method, True if result.complete else None, result.effort)
