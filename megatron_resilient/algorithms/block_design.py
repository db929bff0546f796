"""Which experts share nodes: designs made of blocks of nodes, for nodes that are all alike.

A design says how many nodes hold which experts. It starts from maximum rank overlap (Lazarus,
arXiv 2407.04656, section 4.1): experts in ascending order of replicas, as many at a time as a node
has slots, each such group on a block of nodes of its own, as large as its least replicated expert
allows. Where the nodes run out before the last block is as large as its experts would allow
("truncated"), that is not optimal and can even make the loss of one node fatal, whatever the
minimum of replicas. There, blocks of even size and open blocks are tried as well.

An open block holds fewer experts than a node has slots. All other experts are on all nodes outside
the block, and share the slots left inside it, which is a smaller problem of the same kind. So an
expert is lost only with all nodes outside the block and with its part of the block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_resilient.algorithms.loss_polynomials import LossPolynomials

# Designs for large clusters are compared by the losses of up to this many nodes.
_MAX_COMPARED_LOSSES = 32

# Where experts have more replicas than that, several nodes are designed as one, so that the least
# replicated expert is left with about this many.
_COARSE_REPLICAS = 16

_MAX_BLOCKS_IN_DOUBT = 64

MAX_SUBPROBLEMS = 1_000

# With up to this many blocks, the most replicated experts are tried as a closed block as well.
_MAX_BLOCKS_FROM_BOTH_ENDS = 6

# Sizes of an open block's group that are tried, per choice.
_MAX_OPEN_GROUPS = 8


@dataclass(frozen=True)
class NodeClass:
    """`nodes` nodes that hold the same experts, at most one per slot."""

    nodes: int
    experts: tuple[int, ...]


def is_block_optimal(replicas: Sequence[int], nodes: int, slots_per_node: int) -> bool:
    """Whether maximum rank overlap is known to be optimal, for any number of lost nodes.

    It is when one block suffices, when groups fill nodes exactly, or when all blocks get the size
    that their experts allow. Theorem 1 of Lazarus (arXiv 2407.04656, appendix A.2) claims more,
    but its proof needs the last block not to be truncated.

    Args:
        replicas: Replica counts in ascending order.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.
    """
    experts = len(replicas)
    return (
        experts <= slots_per_node
        or experts % slots_per_node == 0
        or sum(replicas[::slots_per_node]) <= nodes
    )


def block_design(replicas: Sequence[int], nodes: int, slots_per_node: int) -> tuple[NodeClass, ...]:
    """Returns the maximum-rank-overlap design: disjoint blocks of nodes, one per group of experts.

    Args:
        replicas: Replica counts in ascending order; experts of the design are positions in it.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.

    Returns:
        Classes of nodes that sum to N: the blocks, least replicated experts first, then the nodes
        in no block, if any.
    """
    classes = []
    left = nodes
    for start in range(0, len(replicas), slots_per_node):
        group = range(start, min(start + slots_per_node, len(replicas)))
        size = min(replicas[start], left)
        classes.append(NodeClass(size, tuple(group)))
        left -= size
    if left:
        classes.append(NodeClass(left, ()))
    return tuple(classes)


def open_block_design(
    replicas: Sequence[int],
    nodes: int,
    slots_per_node: int,
    max_subproblems: int = MAX_SUBPROBLEMS,
) -> tuple[NodeClass, ...] | None:
    """Returns the best design of closed and open blocks, by the smallest number of losses first.

    Args:
        replicas: Replica counts in ascending order; experts of the design are positions in it.
        nodes: Number of nodes N.
        slots_per_node: Slots of a node.
        max_subproblems: After so many, the first design found is taken for all others.

    Returns:
        Classes of nodes that sum to N, or None if no design of this kind gives every expert a node.
    """
    scale = 1
    if replicas[0] > _MAX_COMPARED_LOSSES:
        scale = replicas[0] // _COARSE_REPLICAS
    coarse_nodes = nodes // scale
    # Blocks before the last ones are never in doubt; leaving them out bounds the recursion.
    fixed = max(0, -(-len(replicas) // slots_per_node) - _MAX_BLOCKS_IN_DOUBT)
    classes = []
    for start in range(0, fixed * slots_per_node, slots_per_node):
        size = min(replicas[start] // scale, coarse_nodes)
        classes.append(NodeClass(size * scale, tuple(range(start, start + slots_per_node))))
        coarse_nodes -= size
    designs = _Designs([count // scale for count in replicas], coarse_nodes, max_subproblems)
    best = designs.best(coarse_nodes, slots_per_node, fixed * slots_per_node)
    if best is None:
        return None
    classes += [NodeClass(own.nodes * scale, own.experts) for own in best.classes()]
    left = nodes - sum(own.nodes for own in classes)
    if left:
        classes.append(NodeClass(left, ()))
    return tuple(classes)


@dataclass(frozen=True)
class _Nested:
    """All experts on the same block; `free` nodes hold none of them."""

    nodes: int
    free: int
    experts: tuple[int, ...]

    def classes(self) -> Iterator[NodeClass]:
        yield NodeClass(self.nodes, self.experts)
        if self.free:
            yield NodeClass(self.free, ())


@dataclass(frozen=True)
class _Closed:
    """A block that is full, and a design of the other experts on the other nodes."""

    nodes: int
    experts: tuple[int, ...]
    outside: "_Design"

    def classes(self) -> Iterator[NodeClass]:
        yield NodeClass(self.nodes, self.experts)
        yield from self.outside.classes()


@dataclass(frozen=True)
class _Open:
    """A block that is not full: the other experts are everywhere outside and designed inside."""

    experts: tuple[int, ...]
    inside: "_Design"
    outside_nodes: int
    outside_experts: tuple[int, ...]

    def classes(self) -> Iterator[NodeClass]:
        for inner in self.inside.classes():
            yield NodeClass(inner.nodes, (*self.experts, *inner.experts))
        if self.outside_nodes:
            yield NodeClass(self.outside_nodes, self.outside_experts)


_Design = _Nested | _Closed | _Open


class _Designs:
    """Best designs of sub-problems: experts `first` to `stop`, of which each has `spent` less."""

    def __init__(self, replicas: Sequence[int], nodes: int, max_subproblems: int) -> None:
        self._max_subproblems = max_subproblems
        self._replicas = tuple(replicas)
        compared = nodes if nodes <= 2 * _MAX_COMPARED_LOSSES else _MAX_COMPARED_LOSSES
        self._losses = LossPolynomials(nodes, compared)
        self._solve = cache(self._search)
        self._solved = 0

    def best(self, nodes: int, slots: int, first: int) -> _Design | None:
        found = self._solve(nodes, slots, first, len(self._replicas), 0)
        return None if found is None else found[1]

    def _search(
        self, nodes: int, slots: int, first: int, stop: int, spent: int
    ) -> tuple[int, _Design] | None:
        """Returns the polynomial of survivable losses, and the design."""
        losses = self._losses
        experts = stop - first
        largest = min(self._replicas[first] - spent, nodes)
        if slots < 1 or largest < 1:
            return None
        if experts <= slots:
            nested = _Nested(largest, nodes - largest, tuple(range(first, stop)))
            return losses.times(losses.some_kept(largest), losses.anything(nodes - largest)), nested
        self._solved += 1
        best: tuple[int, _Design] | None = None
        for found in self._options(nodes, slots, first, stop, spent):
            if best is None or self._is_better(found[0], best[0]):
                best = found
            if best[0] == losses.anything(nodes):  # nothing can be better
                break
            if self._solved > self._max_subproblems:  # what comes first is rank overlap
                break
        return best

    def _options(
        self, nodes: int, slots: int, first: int, stop: int, spent: int
    ) -> Iterator[tuple[int, _Design]]:
        blocks = -(-(stop - first) // slots)
        for size in self._block_sizes(first, spent, nodes, blocks):
            yield from self._closed(size, nodes, slots, first, stop, spent, least_replicated=True)
            for group in self._open_groups(stop - first, slots):
                yield from self._open(size, group, nodes, slots, first, stop, spent)
        if blocks <= _MAX_BLOCKS_FROM_BOTH_ENDS:
            for size in self._block_sizes(stop - slots, spent, nodes, blocks):
                yield from self._closed(
                    size, nodes, slots, first, stop, spent, least_replicated=False
                )

    def _closed(
        self,
        size: int,
        nodes: int,
        slots: int,
        first: int,
        stop: int,
        spent: int,
        *,
        least_replicated: bool,
    ) -> Iterator[tuple[int, _Design]]:
        """A full block, for the least or for the most replicated of the experts."""
        cut = first + slots if least_replicated else stop - slots
        inside, others = (
            ((first, cut), (cut, stop)) if least_replicated else ((cut, stop), (first, cut))
        )
        rest = self._solve(nodes - size, slots, *others, spent) if size < nodes else None
        if rest:
            survivable = self._losses.times(self._losses.some_kept(size), rest[0])
            yield survivable, _Closed(size, tuple(range(*inside)), rest[1])

    def _open(
        self, size: int, group: int, nodes: int, slots: int, first: int, stop: int, spent: int
    ) -> Iterator[tuple[int, _Design]]:
        """A block with the `group` least replicated experts and slots left for all others."""
        losses = self._losses
        outside, cut = nodes - size, first + group
        if self._replicas[cut] - spent <= outside:
            return  # an expert that cannot be everywhere outside, and inside as well
        inside = self._solve(size, slots - group, cut, stop, spent + outside)
        if inside:
            # Survivable: some node of the block is kept, and either a node outside is, or what is
            # kept of the block holds all other experts.
            some_outside = losses.times(losses.some_kept(size), losses.some_kept(outside))
            none_outside = losses.times(losses.all_lost(outside), inside[0])
            design = _Open(tuple(range(first, cut)), inside[1], outside, tuple(range(cut, stop)))
            yield some_outside + none_outside, design

    def _is_better(self, one: int, other: int) -> bool:
        """Whether more losses are survivable, of the smallest size where the numbers differ."""
        differs = self._losses.lowest_difference(one, other)
        return differs is not None and differs[0] > differs[1]

    def _block_sizes(self, first: int, spent: int, nodes: int, blocks: int) -> list[int]:
        """Returns the largest size that `first` allows, and even sizes where those are smaller."""
        largest = min(self._replicas[first] - spent, nodes)
        even = nodes // blocks
        return [largest, *(s for s in (even + 1, even) if 1 <= s < largest)]

    @staticmethod
    def _open_groups(experts: int, slots: int) -> Sequence[int]:
        """Returns sizes of the group inside an open block; the rest must fit outside."""
        sizes = range(max(1, experts - slots), slots)
        if len(sizes) <= _MAX_OPEN_GROUPS:
            return sizes
        step = (len(sizes) - 1) / (_MAX_OPEN_GROUPS - 1)
        return [sizes[round(step * i)] for i in range(_MAX_OPEN_GROUPS)]
