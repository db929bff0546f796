"""The best design of one layer whose nodes are all alike, and whether it is proven to be best."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from megatron_resilient.algorithms import block_design, loss_sweep, node_sets
from megatron_resilient.algorithms.block_design import NodeClass
from megatron_resilient.algorithms.loss_tables import CountMeasure, LossTable
from megatron_resilient.algorithms.placement_search import search_placement
from megatron_resilient.algorithms.slot_layout import fill_nodes

# Clusters up to this size are searched to the end where no theorem applies.
MAX_SEARCHED_NODES = 12

# Designs for balance are made several times and need not be the very best.
_BALANCED_SUBPROBLEMS = 100

# Larger clusters: designs are compared by losses of up to this many nodes.
_COMPARED_LOSSES = 16


@dataclass(frozen=True)
class LayerDesign:
    """A design of one layer.

    Attributes:
        classes: Which nodes hold which experts; experts are positions in the ascending order of
            replica counts.
        method: How it was made: nested, blocks, open blocks, even spread or search.
        optimal: Whether no placement has fewer fatal losses, of the smallest number of lost nodes
            where the numbers differ: True if proven, False if one is known to have fewer for some
            number of lost nodes, None if not known.
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
    """Chooses the design with the fewest fatal losses, those of the fewest nodes first.

    But none that has more of them than maximum rank overlap, for any number of lost nodes (unless
    only such a one gives every expert its minimum of distinct nodes).

    Args:
        replicas: Replica counts in ascending order, each at least 1; their sum is
            nodes * slots_per_node.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.
        min_distinct: Fewest distinct nodes for every expert; min(r_e, f, N) is always possible.
        budget: Sets of nodes to weigh at most for a proof.
    """

    def allowed(classes: Sequence[NodeClass] | None) -> tuple[NodeClass, ...] | None:
        if classes is None:
            return None
        return with_min_distinct(classes, replicas, slots_per_node, min_distinct)

    overlap = block_design.block_design(replicas, nodes, slots_per_node)
    blocks = allowed(overlap)
    if blocks and block_design.is_block_optimal(replicas, nodes, slots_per_node):
        return LayerDesign(blocks, "nested" if len(replicas) <= slots_per_node else "blocks", True)
    opened = allowed(block_design.open_block_design(replicas, nodes, slots_per_node))
    spread = allowed(even_spread(replicas, nodes))
    candidates = [(opened, "open blocks"), (blocks, "blocks"), (spread, "even spread")]
    ceilings = fatal_losses(overlap, nodes)
    known = [(own, method, fatal_losses(own, nodes)) for own, method in candidates if own]
    classes, method, counts = min(
        known,
        key=lambda c: (excess(c[2], ceilings), c[2], _smallest_fatal_sets(c[0])),
    )
    optimal, effort = None, 0
    if nodes <= MAX_SEARCHED_NODES:
        limits: Sequence[int] | None
        for limits in (None, ceilings):
            better, complete, spent = _search(
                classes, replicas, slots_per_node, min_distinct, limits, budget - effort
            )
            effort += spent
            optimal = True if complete else None
            if better is None:
                break
            found = fatal_losses(better, nodes)
            if not excess(found, ceilings):
                classes, method, counts = better, "search", found
                break
            # Better for few losses, worse than rank overlap for many: look again, below it.
            known.append((better, "search", found))
    if any(a < b for _, _, other in known for a, b in zip(other, counts, strict=True)):
        optimal = False
    return LayerDesign(classes, method, optimal, effort)


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
    return block_design.open_block_design(replicas, nodes, slots, _BALANCED_SUBPROBLEMS)


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


def with_min_distinct(
    classes: Sequence[NodeClass],
    replicas: Sequence[int],
    slots_per_node: int,
    min_distinct: Sequence[int],
) -> tuple[NodeClass, ...] | None:
    """Returns the design, or one with leftover replicas put where experts lack distinct nodes.

    None if that does not give every expert its minimum of distinct nodes.
    """

    def suffices(holders: Sequence[int]) -> bool:
        return all(a.bit_count() >= b for a, b in zip(holders, min_distinct, strict=True))

    holders = holders_in_line(classes)
    if suffices(holders):
        return tuple(classes)
    held = node_sets.to_rows(holders, sum(own.nodes for own in classes))
    slots = fill_nodes(held, replicas, np.zeros(len(replicas), dtype=np.int64), slots_per_node)
    filled = classes_of([sorted(set(own)) for own in slots.tolist()])
    return filled if suffices(holders_in_line(filled)) else None


def fatal_losses(classes: Sequence[NodeClass], nodes: int) -> list[int]:
    """Returns how many losses of 0, 1, .. nodes are fatal, up to all nodes or 16 of them."""
    fatal = node_sets.minimal(holders_in_line(classes))
    most = min(nodes, _COMPARED_LOSSES)
    survivable = loss_sweep.count_survivable(fatal, nodes, most)
    if survivable is None:  # too many fatal sets are open at once: take the worst for granted
        survivable = [0] * (most + 1)
    return [comb(nodes, lost) - count for lost, count in enumerate(survivable)]


def excess(counts: Sequence[int], ceilings: Sequence[int]) -> int:
    """Returns by how much counts exceed their ceilings, in total."""
    return sum(max(count - most, 0) for count, most in zip(counts, ceilings, strict=True))


def _smallest_fatal_sets(classes: Sequence[NodeClass]) -> list[int]:
    """Returns what tells designs apart that survive all losses compared: larger sets are better."""
    return [-own.bit_count() for own in node_sets.minimal(holders_in_line(classes))]


def _search(
    classes: Sequence[NodeClass],
    replicas: Sequence[int],
    slots_per_node: int,
    min_distinct: Sequence[int],
    ceilings: Sequence[int] | None,
    budget: int,
) -> tuple[tuple[NodeClass, ...] | None, bool, int]:
    """Searches for a better design.

    Returns:
        The design if there is one, whether everything was searched, and the effort.
    """
    table = LossTable(sum(own.nodes for own in classes))
    measure = CountMeasure(table, ceilings)
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
    if result.holders is None:
        return None, result.complete, result.effort
    held = [
        tuple(e for e, own in enumerate(result.holders) if own >> node & 1)
        for node in range(table.nodes)
    ]
    return classes_of(held), result.complete, result.effort
