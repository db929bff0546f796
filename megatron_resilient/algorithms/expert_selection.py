"""Which experts of every layer a save holds (MoC-System, section 3.2).

The rest stays at older versions. Two levels: a snapshot takes some experts into the host's memory,
and a part of them goes on to storage.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from megatron_resilient.errors import PlanError

POLICIES = ("sequential", "load-aware", "full")

# Per MoE layer, the logical experts in ascending order.
Selection = list[tuple[int, ...]]
Tokens = Sequence[Sequence[int]]


class TwoLevels(NamedTuple):
    """What one save takes at either level; `persist` is a part of `snapshot` in every layer."""

    snapshot: Selection
    persist: Selection


def select(
    policy: str, save: int, layers: int, experts: int, k: int, unsaved: Tokens | None = None
) -> Selection:
    """Chooses the experts of one save.

    Sequential: the m-th MoE layer takes (m + save + j * experts // k) mod experts for j < k, so
    every expert is saved once in ceil(experts / k) saves. The paper prints this for k = 1, where
    layers are out of step with one another, so that writers balance. Of more experts neighbours
    would be one writer's, in most layers at once: so they are as far apart as can be. Load-aware:
    the k experts with most unsaved tokens, ties by number.

    Args:
        policy: one of POLICIES.
        save: number of this save, counted from 0 without gaps.
        layers: MoE layers.
        experts: logical experts of a layer.
        k: experts of a layer to save; `full` ignores it.
        unsaved: tokens since each expert was last saved, [layers][experts]; for `load-aware`.

    Returns:
        The experts of every MoE layer, in ascending order.

    Raises:
        PlanError: a number or a policy that cannot be.
    """
    _check(policy, save, layers, experts, k)
    if policy == "full" or k == experts:
        return [tuple(range(experts)) for _ in range(layers)]
    if policy == "sequential":
        return [tuple(sorted(_due(layer + save, k, experts))) for layer in range(layers)]
    return [_most(k, tokens) for tokens in _by_layer(unsaved, layers, experts)]


def select_two_levels(
    policy: str,
    save: int,
    layers: int,
    experts: int,
    k_snapshot: int,
    k_persist: int,
    unsaved_snapshot: Tokens | None = None,
    unsaved_persist: Tokens | None = None,
) -> TwoLevels:
    """Chooses the experts of one save for both levels.

    Sequential: the snapshot has those that are persisted and, beside them, those that come next, so
    that both levels come to all experts. Load-aware: those with most tokens not persisted are
    persisted; the snapshot has them and, beside them, those with most tokens not in a snapshot.

    Args:
        policy: one of POLICIES; `full` takes all experts at both levels.
        save: number of this save, counted from 0 without gaps.
        layers: MoE layers.
        experts: logical experts of a layer.
        k_snapshot: experts of a layer to copy into the host's memory.
        k_persist: experts of a layer to write; at most `k_snapshot`.
        unsaved_snapshot: tokens since each expert was last in a snapshot; for `load-aware`.
        unsaved_persist: tokens since each expert was last written; for `load-aware`.

    Raises:
        PlanError: a number or a policy that cannot be.
    """
    _check(policy, save, layers, experts, k_snapshot)
    _check(policy, save, layers, experts, k_persist)
    if policy != "full" and k_persist > k_snapshot:
        raise PlanError(
            f"{k_persist} experts of a layer to persist, but {k_snapshot} in the snapshot: "
            "what is not in the snapshot cannot be written"
        )
    persist = select(policy, save, layers, experts, k_persist, unsaved_persist)
    if policy == "full":
        return TwoLevels(persist, persist)
    if policy == "sequential":
        snapshot = [
            tuple(sorted(itertools.islice(_in_turn(layer + save, k_persist, experts), k_snapshot)))
            for layer in range(layers)
        ]
        return TwoLevels(snapshot, persist)
    wider = []
    for written, tokens in zip(persist, _by_layer(unsaved_snapshot, layers, experts), strict=True):
        others = sorted(set(range(experts)) - set(written), key=lambda e: (-tokens[e], e))
        wider.append(tuple(sorted((*written, *others[: k_snapshot - len(written)]))))
    return TwoLevels(wider, persist)


def _due(start: int, k: int, experts: int) -> list[int]:
    """Returns k different experts, as far apart as can be, the first of them `start`."""
    return [(start + j * experts // k) % experts for j in range(k)]


def _in_turn(start: int, k: int, experts: int) -> dict[int, None]:
    """Returns all experts in the order in which saves of k come to them."""
    ahead = range(-(-experts // k))
    return dict.fromkeys(each for more in ahead for each in _due(start + more, k, experts))


def _most(k: int, tokens: Sequence[int]) -> tuple[int, ...]:
    ranked = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))
    return tuple(sorted(ranked[:k]))


def _by_layer(unsaved: Tokens | None, layers: int, experts: int) -> Tokens:
    if unsaved is None or len(unsaved) != layers or any(len(row) != experts for row in unsaved):
        raise PlanError(
            f"load-aware selection needs the unsaved tokens of {layers} layers x {experts} experts"
        )
    return unsaved


def _check(policy: str, save: int, layers: int, experts: int, k: int) -> None:
    if policy not in POLICIES:
        raise PlanError(f"selection of experts {policy!r}: use one of {', '.join(POLICIES)}")
    if save < 0 or layers < 0:
        raise PlanError(f"save {save} of {layers} layers: neither can be negative")
    if policy != "full" and not 1 <= k <= experts:
        raise PlanError(f"{k} of {experts} experts of a layer cannot be saved")
