"""Which node plays which part, when nodes and racks differ in how likely they fail.

A plan for nodes that are all alike names positions. Here positions get nodes, such that the fatal
sets of all layers together are unlikely to be lost.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.topology import AllLost, Topology

# Table entries times choices that the exact division of nodes among blocks may cost.
_MAX_EXACT_WORK = 2_000_000

# How many partners are drawn for a node before it is left where it is.
_PARTNERS = 16


@dataclass(frozen=True)
class NodeFit:
    """Nodes for positions.

    Attributes:
        node_of: Node at every position; a permutation.
        method: How it was found.
    """

    node_of: tuple[int, ...]
    method: str


def fit_to_topology(
    fatal_sets: Sequence[int], topology: Topology, *, seed: int = 0, budget: int = 20_000
) -> NodeFit:
    """Chooses nodes for positions.

    Exact by dynamic programming for a single fatal set, with racks, and for disjoint ones (the
    blocks of grouped plans) when nodes fail independently and few failure probabilities occur.
    Otherwise seeded local search: two nodes exchange their positions while that helps.

    Args:
        fatal_sets: Minimal fatal sets of positions, of all layers together.
        topology: The nodes and racks.
        seed: Of the local search.
        budget: Exchanges to try; counted, so that all ranks stop at the same point.
    """
    topology = topology.simplified()
    if topology.is_uniform or not fatal_sets:
        return NodeFit(tuple(range(topology.nodes)), "any order")
    if len(fatal_sets) == 1:
        nodes = safest_nodes(topology, fatal_sets[0].bit_count())
        return NodeFit(_seat([list(node_sets.members(fatal_sets[0]))], [nodes], topology), "exact")
    exact = _divide_exactly(fatal_sets, topology)
    if exact is not None:
        return NodeFit(exact, "exact for blocks")
    start = min(
        (tuple(range(topology.nodes)), _deal(fatal_sets, topology)),
        key=_Cost(fatal_sets, topology).total,
    )
    return NodeFit(_exchange(start, fatal_sets, topology, seed, budget), "node exchange")


def safest_nodes(topology: Topology, count: int) -> list[int]:
    """Returns `count` nodes that are least likely to be all lost. Exact; O(nodes * count).

    Within a rack the most reliable nodes are taken first; how many from which rack is decided by
    dynamic programming over the racks.
    """
    topology = topology.simplified()
    if not topology.rack_failure_probability:
        by_reliability = sorted(range(topology.nodes), key=topology.failure_probability.__getitem__)
        return by_reliability[:count]
    all_lost = AllLost(topology)
    # best[k]: logarithm of the probability that k nodes of the domains so far are lost, and them.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * count]
    for domain in topology.domains():
        nodes = sorted(domain.nodes, key=lambda n: (topology.failure_probability[n], n))
        prefixes = [tuple(nodes[:size]) for size in range(min(len(nodes), count) + 1)]
        costs = [_log(all_lost(own)) for own in prefixes]
        best = [
            min(
                (
                    (before[0] + costs[size], (*before[1], *own))
                    for size, own in enumerate(prefixes[: total + 1])
                    if (before := best[total - size]) is not None
                ),
                default=None,
            )
            for total in range(count + 1)
        ]
    chosen = best[count]
    assert chosen is not None, "more nodes asked for than there are"
    return list(chosen[1])


def probability_of_alive(topology: Topology, at_least: int) -> float:
    """Returns the probability that at least so many nodes are alive."""
    topology = topology.simplified()
    alive = np.ones(1)
    for domain in topology.domains():
        own = np.ones(1)
        for node in domain.nodes:
            failure = topology.failure_probability[node]
            own = np.convolve(own, [failure, 1 - failure])
        own *= 1 - domain.failure_probability
        own[0] += domain.failure_probability
        alive = np.convolve(alive, own)
    return float(alive[at_least:].sum())


def survival_bound(
    least_replicas: int, experts: int, slots_per_node: int, topology: Topology
) -> float:
    """Returns a survival probability that no placement of a layer can exceed.

    The least replicated expert on the nodes that suit it best, or enough nodes alive to hold all
    experts, whichever is less likely.
    """
    size = min(least_replicas, topology.nodes)
    lost = AllLost(topology)(safest_nodes(topology, size))
    return min(1 - lost, probability_of_alive(topology, -(-experts // slots_per_node)))


class _Cost:
    """What an assignment costs: minus the logarithm of survival, were fatal sets independent."""

    def __init__(self, fatal_sets: Sequence[int], topology: Topology) -> None:
        self._all_lost = AllLost(topology)
        self.members = [list(node_sets.members(fatal)) for fatal in fatal_sets]
        self.sets_of: list[list[int]] = [[] for _ in range(topology.nodes)]
        for index, positions in enumerate(self.members):
            for position in positions:
                self.sets_of[position].append(index)

    def of_set(self, node_of: Sequence[int], index: int) -> float:
        lost = self._all_lost(node_of[position] for position in self.members[index])
        return -_log(1 - lost)

    def total(self, node_of: Sequence[int]) -> float:
        return sum(self.of_set(node_of, index) for index in range(len(self.members)))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _seat(
    positions: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], topology: Topology
) -> tuple[int, ...]:
    """Returns the permutation that seats groups of nodes at groups of positions; others follow."""
    node_of = [-1] * topology.nodes
    for own_positions, own_nodes in zip(positions, nodes, strict=True):
        for position, node in zip(own_positions, sorted(own_nodes), strict=True):
            node_of[position] = node
    others = iter(sorted(set(range(topology.nodes)) - set(node_of)))
    return tuple(node if node >= 0 else next(others) for node in node_of)


def _divide_exactly(fatal_sets: Sequence[int], topology: Topology) -> tuple[int, ...] | None:
    """Divides independent nodes among disjoint blocks such that survival is greatest.

    Dynamic programming over the blocks; the state is how many nodes of each failure probability are
    taken. None if the blocks overlap, racks matter, or there are too many states.
    """
    sizes = [fatal.bit_count() for fatal in fatal_sets]
    union = 0
    for fatal in fatal_sets:
        union |= fatal
    if topology.rack_failure_probability or union.bit_count() != sum(sizes):
        return None
    kinds = sorted(Counter(topology.failure_probability).items())
    states = math.prod(count + 1 for _, count in kinds) // (max(c for _, c in kinds) + 1)
    choices = math.comb(max(sizes) + len(kinds) - 1, len(kinds) - 1)
    if states * choices * len(sizes) > _MAX_EXACT_WORK:
        return None

    @cache
    def compositions(size: int, kinds_left: int) -> list[tuple[int, ...]]:
        if kinds_left == 1:
            return [(size,)]
        return [
            (own, *rest)
            for own in range(size + 1)
            for rest in compositions(size - own, kinds_left - 1)
        ]

    # The nodes that stay in no block are one more block, which may be lost.
    blocks = [*sizes, topology.nodes - sum(sizes)]
    start = tuple(count for _, count in kinds)
    best: dict[tuple[int, ...], tuple[float, tuple[tuple[int, ...], ...]]] = {start: (0.0, ())}
    for index, size in enumerate(blocks):
        after: dict[tuple[int, ...], tuple[float, tuple[tuple[int, ...], ...]]] = {}
        for left, (cost, chosen) in best.items():
            for own in compositions(size, len(kinds)):
                if any(a > b for a, b in zip(own, left, strict=True)):
                    continue
                lost = math.prod(p**n for (p, _), n in zip(kinds, own, strict=True))
                then = cost - (_log(1 - lost) if index < len(sizes) else 0.0)
                state = tuple(b - a for a, b in zip(own, left, strict=True))
                if state not in after or then < after[state][0]:
                    after[state] = (then, (*chosen, own))
        best = after
    ((_, chosen),) = best.values()
    pools = {
        p: [n for n in range(topology.nodes) if topology.failure_probability[n] == p][::-1]
        for p, _ in kinds
    }
    nodes = [
        [pools[p].pop() for (p, _), count in zip(kinds, own, strict=True) for _ in range(count)]
        for own in chosen[: len(sizes)]
    ]
    return _seat([list(node_sets.members(fatal)) for fatal in fatal_sets], nodes, topology)


def _deal(fatal_sets: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Deals nodes to the fatal sets in turn, reliable ones first, each set over many racks."""
    domain_of = AllLost(topology).domain_of
    left = sorted(range(topology.nodes), key=lambda n: (topology.failure_probability[n], n))
    node_of = [-1] * topology.nodes
    seats = [list(node_sets.members(fatal)) for fatal in fatal_sets]
    for turn in range(max(map(len, seats))):
        for own in seats:
            if turn < len(own) and node_of[own[turn]] < 0:
                racks = {domain_of[node_of[seat]] for seat in own if node_of[seat] >= 0}
                index = next((i for i, n in enumerate(left) if domain_of[n] not in racks), 0)
                node_of[own[turn]] = left.pop(index)
    others = iter(left)
    return tuple(node if node >= 0 else next(others) for node in node_of)


def _exchange(
    start: Sequence[int], fatal_sets: Sequence[int], topology: Topology, seed: int, budget: int
) -> tuple[int, ...]:
    """Lets nodes of the likeliest fatal sets exchange positions with others while that helps."""
    cost = _Cost(fatal_sets, topology)
    rng = random.Random(seed)
    node_of = list(start)
    costs = [cost.of_set(node_of, index) for index in range(len(fatal_sets))]
    improved = True
    while improved:
        improved = False
        for worst in sorted(range(len(costs)), key=lambda index: -costs[index]):
            for position in cost.members[worst]:
                for _ in range(_PARTNERS):
                    other = rng.randrange(topology.nodes)
                    touched = set(cost.sets_of[position]) ^ set(cost.sets_of[other])
                    if not touched:
                        continue
                    budget -= 1
                    if budget < 0:
                        return tuple(node_of)
                    node_of[position], node_of[other] = node_of[other], node_of[position]
                    then = {index: cost.of_set(node_of, index) for index in touched}
                    if sum(then.values()) < sum(costs[index] for index in touched) * (1 - 1e-12):
                        for index, value in then.items():
                            costs[index] = value
                        improved = True
                    else:
                        node_of[position], node_of[other] = node_of[other], node_of[position]
    return tuple(node_of)
