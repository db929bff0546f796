"""From expert loads to what each rank holds: the plan that training carries out."""

from collections.abc import Sequence

from megatron_resilient.algorithms.replication import allocate_replicas


def plan_layers(
    loads: Sequence[Sequence[int]],
    ranks: int,
    ranks_per_node: int,
    slots_per_rank: int,
    min_replicas: int,
) -> list[list[list[int]]]:
    """INTERIM."""
    plans = []
    for layer in loads:
        counts = list(allocate_replicas(layer, ranks * slots_per_rank, min_replicas).replicas)
        E = len(counts)
        while max(counts) > ranks:
            hot = counts.index(max(counts))
            counts[hot] -= 1
            cand = [e for e in range(E) if counts[e] < ranks]
            counts[max(cand, key=lambda e: (layer[e] / counts[e], -e))] += 1
        holding: list[list[int]] = [[] for _ in range(ranks)]
        weight = [0.0] * ranks
        for e in sorted(range(E), key=lambda e: (-counts[e], e)):
            order = sorted(
                (
                    r
                    for r in range(ranks)
                    if len(holding[r]) < slots_per_rank and e not in holding[r]
                ),
                key=lambda r: (len(holding[r]), weight[r], r),
            )
            for r in order[: counts[e]]:
                holding[r].append(e)
                weight[r] += layer[e] / counts[e]
        plans.append([sorted(h) for h in holding])
    return plans
