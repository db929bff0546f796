"""From expert loads to what each rank holds: the plan that training carries out."""

from collections.abc import Sequence
from itertools import chain
from math import gcd

from megatron_resilient.algorithms.placement import place_replicas
from megatron_resilient.algorithms.replication import allocate_replicas

Holding = list[list[int]]

# Placements may give up survivable losses beyond the minimum of replicas for balance beyond this.
MAX_IMBALANCE = 1.05


def plan_layers(
    loads: Sequence[Sequence[int]],
    ranks: int,
    ranks_per_node: int,
    slots_per_rank: int,
    min_replicas: int,
) -> list[Holding]:
    """Plans the slots of an expert-parallel domain for all its layers.

    Replicas in proportion to load (Lazarus, arXiv 2407.04656, section 4.1), placed to survive lost
    nodes and to balance ranks. No rank holds an expert twice: a second slot of the same expert on
    the same rank could take no token that the first could not.

    Args:
        loads: tokens of every expert of every layer.
        ranks: ranks of the domain.
        ranks_per_node: consecutive ranks that fail together; where they do not divide `ranks`,
            the largest number that divides both.
        slots_per_rank: slots of a rank; at most the number of experts.
        min_replicas: nodes that each expert should be on, as far as slots suffice.

    Returns:
        For each layer the experts of each rank, ascending.

    Raises:
        PlanError: fewer slots than experts, or more slots on a rank than experts.
    """
    ranks_per_node = gcd(ranks, ranks_per_node)
    counts = [_replicas(layer, ranks, slots_per_rank, min_replicas) for layer in loads]
    placement = place_replicas(
        counts,
        ranks // ranks_per_node,
        ranks_per_node * slots_per_rank,
        min_replicas=min_replicas,
        loads=loads,
        ranks_per_node=ranks_per_node,
        max_imbalance=MAX_IMBALANCE,
    )
    return [
        without_repeats(holding.tolist(), layer)
        for holding, layer in zip(placement.by_rank, loads, strict=True)
    ]


def _replicas(loads: Sequence[int], ranks: int, slots_per_rank: int, minimum: int) -> list[int]:
    """Allocates replicas, at most one per rank; what is over goes to the next hottest experts."""
    counts = list(allocate_replicas(loads, ranks * slots_per_rank, minimum).replicas)
    spare = sum(max(0, count - ranks) for count in counts)
    counts = [min(count, ranks) for count in counts]
    for _ in range(spare):
        counts[_hottest(loads, counts, [e for e, c in enumerate(counts) if c < ranks])] += 1
    return counts


def without_repeats(holding: Holding, loads: Sequence[int]) -> Holding:
    """Gives every slot that repeats an expert of its rank to the hottest expert not on the rank.

    Args:
        holding: experts of each rank; no more per rank than there are experts.
        loads: tokens of every expert.

    Returns:
        The experts of each rank, distinct and ascending. No expert loses its last replica.
    """
    counts = [0] * len(loads)
    for expert in chain.from_iterable(holding):
        counts[expert] += 1
    distinct = []
    for slots in holding:
        own = sorted(set(slots))
        if len(own) == len(slots):
            distinct.append(own)
            continue
        for expert in own:
            counts[expert] -= slots.count(expert) - 1
        for _ in range(len(slots) - len(own)):
            absent = [e for e in range(len(loads)) if e not in own]
            chosen = _hottest(loads, counts, absent)
            counts[chosen] += 1
            own.append(chosen)
        distinct.append(sorted(own))
    return distinct


def _hottest(loads: Sequence[int], counts: Sequence[int], among: Sequence[int]) -> int:
    """Returns the expert with most tokens per replica, ties by index; in integers."""
    best = among[0]
    for expert in among[1:]:
        if loads[expert] * counts[best] > loads[best] * counts[expert]:
            best = expert
    return best
