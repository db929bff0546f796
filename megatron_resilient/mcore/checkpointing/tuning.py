"""Chooses, from what was measured, what a snapshot takes and how often to save."""

import time
from dataclasses import dataclass, field

from megatron_resilient.algorithms.checkpoint_tuning import save_interval, snapshot_size
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import expert_of
from megatron_resilient.mcore.checkpointing.layout import Layout

_MICRO = 1_000_000
# Of the time from a save to the next update a copy may take so much: steps are not all alike.
_SHARE = 0.8
_LATEST_WEIGHT = 0.2


@dataclass
class Measured:
    """Times of this rank. What ranks do with them they first agree on: `told`, summed over ranks.

    Attributes:
        step_seconds: of a step, a moving mean.
        free_seconds: from a save to the next update: the time in which a copy costs nothing.
        copy_seconds: of the last copy.
        copy_bytes: of the last copy.
    """

    step_seconds: float = 0.0
    free_seconds: float = 0.0
    copy_seconds: float = 0.0
    copy_bytes: int = 0
    _last: float = field(default=0.0)

    def between_steps(self) -> None:
        """To be called once between any two steps."""
        now = time.perf_counter()
        if self._last:
            seconds = now - self._last
            known = self.step_seconds or seconds
            self.step_seconds = (1 - _LATEST_WEIGHT) * known + _LATEST_WEIGHT * seconds
        self._last = now

    def told(self) -> list[int]:
        """Returns what the others must know, as whole numbers: microseconds and bytes."""
        seconds = (self.step_seconds, self.free_seconds, self.copy_seconds)
        return [*(round(_MICRO * each) for each in seconds), self.copy_bytes]


def snapshot_experts(told: list[int], layout: Layout, persist: int) -> int:
    """Returns the experts of a layer that a snapshot can take without making training wait.

    Args:
        told: sum over ranks of `Measured.told`.
        layout: who holds what.
        persist: experts of a layer that are written.
    """
    _, free, copying, size = told
    if not (free and copying and size):
        return persist  # nothing was measured yet
    experts = rest = 0
    for key, info in layout.arrays.items():
        total = info.size * sum(ELEMENT_BYTES[dtype] for dtype in info.kinds.values())
        if expert_of(key) is not None:
            experts += total
        else:
            rest += total
    ranks = len(layout.held)
    return snapshot_size(
        lambda k: (rest + experts * k / layout.experts) / ranks,
        layout.experts,
        # Both are sums over ranks: what is left is the rate of one.
        size / (copying / _MICRO),
        _SHARE * free / ranks / _MICRO,
        at_least=persist,
    ).k


def interval(
    told: list[int], ranks: int, persist_seconds: float, stall_seconds: float, mtbf_seconds: float
) -> int | None:
    """Returns the steps between two saves that cost least; None while a step was not measured.

    Args:
        told: sum over ranks of `Measured.told`.
        ranks: how many.
        persist_seconds: from the beginning of a save until it is there.
        stall_seconds: in which training waited for it.
        mtbf_seconds: mean time between faults of the whole job.
    """
    step_seconds = told[0] / ranks / _MICRO
    if not step_seconds:
        return None
    return save_interval(persist_seconds, step_seconds, step_seconds / mtbf_seconds, stall_seconds)
