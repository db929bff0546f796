"""All ways to lose nodes of a small cluster at once: a bit per set of lost nodes.

With N nodes there are 2^N sets of lost nodes. A family of them is an integer of 2^N bits, in which
bit L stands for the loss of exactly the nodes in L (see `node_sets`). Losses that lose an expert
for good form such a family, and a placement is judged by how heavy the union over its experts is.
"""

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from itertools import batched
from operator import or_
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.topology import Topology


class LossTable:
    """Families of losses of `nodes` nodes. Everything here costs O(2^nodes) bits."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.everything = (1 << (1 << nodes)) - 1
        # Losing node j: runs of 2^j losses that keep it alternate with runs that lose it.
        self._losing_node = [
            self.everything // ((1 << (1 << node)) + 1) << (1 << node) for node in range(nodes)
        ]
        self.losing_all = cache(self._losing_all)

    def _losing_all(self, node_set: int) -> int:
        """Returns the losses that include all nodes of the set."""
        if not node_set:
            return self.everything
        lowest = node_set & -node_set
        return self.losing_all(node_set ^ lowest) & self._losing_node[lowest.bit_length() - 1]

    def fatal(self, holders: Iterable[int]) -> int:
        """Returns the losses that include all holders of some expert."""
        return reduce(or_, map(self.losing_all, holders), 0)

    def keeping_less_than(self, needed: int, worth: tuple[int, ...]) -> int:
        """Returns the losses after which the nodes kept are worth less than `needed` in total."""
        # Over the first nodes only, node by node: the losses with less than t kept, for every t.
        less = [0] + [1] * needed
        for node, own in enumerate(worth):
            less = [less[max(t - own, 0)] | less[t] << (1 << node) for t in range(needed + 1)]
        return less[needed]

    def by_size(self) -> list[int]:
        """Returns the losses of 0, 1, .. nodes."""
        sizes = [1]
        for node in range(self.nodes):
            kept, lost = [*sizes, 0], [0, *sizes]
            sizes = [a | b << (1 << node) for a, b in zip(kept, lost, strict=True)]
        return sizes


class LossMeasure(Protocol):
    """How heavy a family of losses is: what a placement should make small."""

    def __call__(self, losses: int, /) -> float:
        """Returns the cost of a family."""
        ...

    def limit(self, cost: float, /) -> float:
        """Returns what a cost must stay below in order to be an improvement."""
        ...


class CountMeasure:
    """Counts of losses of 0, 1, .. nodes, the smallest losses first: exact, in one integer.

    With ceilings, what exceeds them comes before everything else.
    """

    def __init__(self, table: LossTable, ceilings: Sequence[int] | None = None) -> None:
        self._sizes = table.by_size()
        self._width = table.nodes + 1
        self._ceilings = ceilings

    def __call__(self, losses: int) -> int:
        """Returns the excess over the ceilings and then the counts, as digits of one number."""
        counts = self.counts(losses)
        packed = self.excess(counts)
        for count in counts:
            packed = packed << self._width | count
        return packed

    def limit(self, cost: float) -> float:
        """Counts are exact, so any smaller one is an improvement."""
        return cost

    def counts(self, losses: int) -> list[int]:
        """Returns how many losses of 0, 1, .. nodes there are in the family."""
        return [(losses & size).bit_count() for size in self._sizes]

    def excess(self, counts: Sequence[int]) -> int:
        """Returns by how much the counts exceed the ceilings."""
        if self._ceilings is None:
            return 0
        return sum(max(a - b, 0) for a, b in zip(counts, self._ceilings, strict=True))


class ProbabilityMeasure:
    """Probability of a family of losses under a topology, in fixed point.

    Integers, because the order of a sum must not decide which placement is better.
    """

    _ONE = 1 << 62
    # The probabilities themselves are rounded; differences like that are no improvement.
    _RELATIVE_TOLERANCE = 1e-10

    def __init__(self, topology: Topology) -> None:
        probability = [round(p * self._ONE) for p in loss_probabilities(topology).tolist()]
        probability += [0] * (-len(probability) % 8)
        # By byte of the family and value of that byte.
        self._by_byte = [
            [sum(p for bit, p in enumerate(own) if value >> bit & 1) for value in range(256)]
            for own in batched(probability, 8)
        ]

    def __call__(self, losses: int) -> int:
        """Returns the probability that one of the losses happens."""
        as_bytes = losses.to_bytes(len(self._by_byte), "little")
        return sum(map(list.__getitem__, self._by_byte, as_bytes))

    def limit(self, cost: float) -> float:
        """Returns the cost less what rounding may account for."""
        return cost * (1 - self._RELATIVE_TOLERANCE)


def loss_probabilities(topology: Topology) -> npt.NDArray[np.float64]:
    """Returns the probability of losing exactly the nodes in L, for every L; shape [2^nodes]."""
    topology = topology.simplified()
    losses = np.arange(1 << topology.nodes)
    probability = np.ones(len(losses))
    for domain in topology.domains():
        own = np.ones(len(losses))
        for node in domain.nodes:
            failure = topology.failure_probability[node]
            own *= np.where(losses >> node & 1, failure, 1 - failure)
        together = node_sets.from_members(domain.nodes)
        own *= 1 - domain.failure_probability
        own[losses & together == together] += domain.failure_probability
        probability *= own
    return probability
