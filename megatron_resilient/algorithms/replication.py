"""How many replicas each expert gets: in proportion to its tokens, never below a minimum."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

from megatron_resilient.errors import PlanError, UnrecoverablePlanError

# Exact numbers only, so that every rank computes the same plan.
Load = int | Fraction


@dataclass(frozen=True)
class ReplicaAllocation:
    """Replicas of every expert of one layer.

    Attributes:
        replicas: Replica count of every expert; sums to the slots of the cluster.
        min_replicas: The minimum that was asked for.
        effective_min_replicas: The minimum that was kept: `min_replicas`, or less where the slots
            do not suffice.
    """

    replicas: tuple[int, ...]
    min_replicas: int
    effective_min_replicas: int


def allocate_replicas(
    loads: Iterable[int | float | Fraction], slots: int, min_replicas: int = 1
) -> ReplicaAllocation:
    """Gives every expert slots in proportion to its load, and at least `min_replicas` of them.

    From the least to the most loaded expert (ties by index), each takes its share of the slots
    still free, rounded down, or the minimum; the last takes the rest. The minimum is lowered to
    `slots // experts` when the slots do not reach for more, and only then.

    Lazarus (arXiv 2407.04656), section 4.1, equation 1, in integers. O(E log E).

    Args:
        loads: Tokens of every expert in the window; any finite non-negative numbers.
        slots: Replica slots of the whole cluster (nodes times slots per node).
        min_replicas: Replicas that every expert should have (the fault-tolerance threshold f).

    Returns:
        The allocation. Counts sum to `slots` and do not decrease with the load.

    Raises:
        PlanError: A load or a size that makes no sense.
        UnrecoverablePlanError: Fewer slots than experts.
    """
    tokens = exact_loads(loads)
    experts = len(tokens)
    if min_replicas < 1:
        raise PlanError(f"min_replicas is {min_replicas}: it must be at least 1")
    if slots < experts:
        raise UnrecoverablePlanError(
            f"{experts} experts do not fit into {slots} slots: "
            "give every node more slots or use more nodes"
        )
    minimum = min(min_replicas, slots // experts)
    replicas = [0] * experts
    slots_left = slots
    tokens_left: Load = sum(tokens)
    for position, expert in enumerate(sorted(range(experts), key=lambda e: (tokens[e], e))):
        experts_left = experts - position
        if tokens_left > 0:
            share = int(tokens[expert] * slots_left // tokens_left)
        else:  # nobody has tokens: share evenly
            share = slots_left // experts_left
        replicas[expert] = max(share, minimum)
        slots_left -= replicas[expert]
        tokens_left -= tokens[expert]
    return ReplicaAllocation(tuple(replicas), min_replicas, minimum)


def slot_imbalance(loads: Sequence[int | float | Fraction], replicas: Sequence[int]) -> float:
    """Returns max/mean tokens per slot when each expert's tokens are shared evenly by its slots.

    1.0 is perfect, and what a layer without tokens has.
    """
    tokens = exact_loads(loads)
    total = sum(tokens)
    if not total:
        return 1.0
    fullest = max(Fraction(t, r) for t, r in zip(tokens, replicas, strict=True))
    return float(fullest * sum(replicas) / total)


def exact_loads(loads: Iterable[int | float | Fraction]) -> list[Load]:
    """Returns loads as exact numbers.

    Raises:
        PlanError: A load that is negative or not finite, or no load at all.
    """
    exact: list[Load] = []
    for expert, load in enumerate(loads):
        if isinstance(load, Integral):
            exact.append(int(load))
        elif math.isfinite(load):
            exact.append(int(load) if load == int(load) else Fraction(load))
        else:
            exact.append(-1)
        if exact[-1] < 0:
            raise PlanError(f"load of expert {expert} is {load}: it must be finite and >= 0")
    if not exact:
        raise PlanError("a layer needs at least one expert")
    return exact
