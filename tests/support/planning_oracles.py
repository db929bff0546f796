"""Slow and simple references for the planning algorithms: they enumerate, and share no code."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np


def partitions(total: int, parts: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields all ascending tuples of `parts` integers >= `least` that sum to `total`."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total // parts + 1):
        for rest in partitions(total - first, parts - 1, first):
            yield (first, *rest)


def small_instances(
    max_nodes: int, max_slots: int, max_experts: int, min_nodes: int = 1
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields (ascending replicas, nodes, slots per node) of all instances up to these sizes."""
    for nodes in range(min_nodes, max_nodes + 1):
        for slots in range(1, max_slots + 1):
            for experts in range(1, min(max_experts, nodes * slots) + 1):
                for replicas in partitions(nodes * slots, experts):
                    yield replicas, nodes, slots


@cache
def _losses_including(nodes: int) -> tuple[int, ...]:
    """For every set of nodes: the losses that include it, as a number with a bit per loss."""
    return tuple(
        sum(1 << loss for loss in range(1 << nodes) if loss & own == own)
        for own in range(1 << nodes)
    )


@cache
def fatal_families(replicas: tuple[int, ...], nodes: int, slots: int) -> frozenset[int]:
    """Returns the fatal losses of every plan there is, up to a renaming of nodes.

    A family of losses is a number with bit L set if losing exactly the nodes of L is fatal. Plans
    are enumerated node by node: each node gets a multiset of experts, in ascending order of these.
    """
    contents = list(itertools.combinations_with_replacement(range(len(replicas)), slots))
    including = _losses_including(nodes)
    holders, left = [0] * len(replicas), list(replicas)
    families = set()

    def fill(node: int, lowest: int) -> None:
        if node == nodes:
            family = 0
            for own in holders:
                family |= including[own]
            families.add(family)
            return
        for index in range(lowest, len(contents)):
            chosen = contents[index]
            for expert in chosen:
                left[expert] -= 1
            if min(left) >= 0:
                for expert in set(chosen):
                    holders[expert] |= 1 << node
                fill(node + 1, index)
                for expert in set(chosen):
                    holders[expert] ^= 1 << node
            for expert in chosen:
                left[expert] += 1

    fill(0, 0)
    return frozenset(families)


def fewest_fatal_losses(replicas: tuple[int, ...], nodes: int, slots: int) -> list[int]:
    """Returns the fewest fatal losses of k nodes that any plan has, for each k by itself."""
    by_size = [
        sum(1 << loss for loss in range(1 << nodes) if loss.bit_count() == size)
        for size in range(nodes + 1)
    ]
    return [
        min((family & own).bit_count() for family in fatal_families(replicas, nodes, slots))
        for own in by_size
    ]


def loss_probability(
    node_failure: Sequence[float], rack_of: Sequence[int], rack_failure: Sequence[float]
) -> np.ndarray:
    """Returns the probability of losing exactly the nodes of L, for every L; -1 is no rack."""
    nodes = len(node_failure)
    probability = np.zeros(1 << nodes)
    for down in itertools.product((False, True), repeat=len(rack_failure)):
        of_racks = np.prod([q if d else 1 - q for q, d in zip(rack_failure, down, strict=True)])
        for loss in range(1 << nodes):
            weight = of_racks
            for node, failure in enumerate(node_failure):
                lost = bool(loss >> node & 1)
                if rack_of[node] >= 0 and down[rack_of[node]]:
                    weight *= lost
                else:
                    weight *= failure if lost else 1 - failure
            probability[loss] += weight
    return probability


def best_survival(
    replicas: tuple[int, ...], nodes: int, slots: int, probability: np.ndarray
) -> float:
    """Returns the highest survival probability of any plan, over all ways to name its nodes."""
    families = np.array(
        [
            [family >> loss & 1 for loss in range(1 << nodes)]
            for family in fatal_families(replicas, nodes, slots)
        ],
        dtype=float,
    )
    renamed = np.array(
        [
            [
                probability[sum(1 << new[node] for node in range(nodes) if loss >> node & 1)]
                for loss in range(1 << nodes)
            ]
            for new in itertools.permutations(range(nodes))
        ]
    )
    return float(1 - (families @ renamed.T).min())


def is_fatal(slots: np.ndarray, experts: int, lost: Sequence[int]) -> bool:
    """Whether losing these nodes loses an expert; slots are [nodes, slots per node]."""
    kept = np.delete(np.asarray(slots), list(lost), axis=0)
    return len(np.unique(kept)) < experts


def recovery_by_enumeration(slots: np.ndarray, experts: int, losses: int) -> float:
    """Returns the share of all losses of so many nodes that keep every expert."""
    sets = list(itertools.combinations(range(len(slots)), losses))
    return sum(not is_fatal(slots, experts, lost) for lost in sets) / len(sets)


def rank_overlap(replicas: Sequence[int], nodes: int, slots: int) -> np.ndarray:
    """Returns the paper's plan (Lazarus, arXiv 2407.04656, section 4.1) for ascending replicas.

    Leftover replicas go where the paper leaves it open: to nodes without the expert first, then to
    the emptiest, then to the lowest.
    """
    experts = len(replicas)
    held: list[list[int]] = [[] for _ in range(nodes)]
    left = list(replicas)
    start = 0
    for first in range(0, experts, slots):
        size = min(replicas[first], nodes - start)
        for node in range(start, start + size):
            for expert in range(first, min(first + slots, experts)):
                held[node].append(expert)
                left[expert] -= 1
        start += size
    for expert in range(experts):
        while left[expert]:
            node = min(
                (n for n in range(nodes) if len(held[n]) < slots),
                key=lambda n: (expert in held[n], len(held[n]), n),
            )
            held[node].append(expert)
            left[expert] -= 1
    return np.array(held)


def spread(replicas: Sequence[int], nodes: int, slots: int) -> np.ndarray:
    """Returns the plan that deals replicas to the nodes in turn."""
    dealt = np.repeat(np.arange(len(replicas)), replicas)
    return dealt.reshape(slots, nodes).T


def compact(replicas: Sequence[int], nodes: int, slots: int) -> np.ndarray:
    """Returns the plan that packs the replicas of an expert on as few nodes as possible."""
    return np.repeat(np.arange(len(replicas)), replicas).reshape(nodes, slots)
