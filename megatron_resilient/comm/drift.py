"""Whether operations still take as long as their profile says, seen from the real steps."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_resilient.comm.device import device_of


@dataclass(frozen=True)
class DriftLimits:
    """When a profile no longer holds.

    Attributes:
        low: smallest ratio of measured to predicted time that is no drift.
        high: the largest.
        window: how many of the last observations of each operation count.
        least: with fewer nothing is said.
    """

    low: float = 0.8
    high: float = 1.25
    window: int = 64
    least: int = 16


class DriftMonitor:
    """Compares what was measured with what was predicted. O(1) per observation, no communication.

    Args:
        predict_ms: gives an operation's milliseconds for its units of work; NaN: unknown.
        local: operations without communication: of these the slowest rank counts. Of the others
            the fastest does: the others' times contain their waiting for it.
        limits: see `DriftLimits`.
    """

    def __init__(
        self,
        predict_ms: Callable[[str, float], float],
        local: Iterable[str] = ("gemm",),
        limits: DriftLimits | None = None,
    ) -> None:
        self._predict_ms = predict_ms
        self._local = frozenset(local)
        self._limits = limits or DriftLimits()
        self._ratios: dict[str, deque[float]] = {}

    def observe(self, operation: str, units: float, seconds: float) -> None:
        """Takes note of one operation; not of one without work."""
        if units <= 0:
            return
        predicted = self._predict_ms(operation, units)
        if predicted > 0:  # not NaN either
            if operation not in self._ratios:
                self._ratios[operation] = deque(maxlen=self._limits.window)
            self._ratios[operation].append(1000 * seconds / predicted)

    def medians(self) -> Mapping[str, float]:
        """Returns this rank's median ratio of each operation that was seen often enough."""
        return {
            operation: statistics.median(ratios)
            for operation, ratios in self._ratios.items()
            if len(ratios) >= self._limits.least
        }

    def drifted(self, operations: Iterable[str], group: dist.ProcessGroup) -> dict[str, float]:
        """Returns what drifted, with its ratio; the same on every rank. One small all-reduce.

        Who gets something back profiles and plans anew, and starts with a new monitor.

        Args:
            operations: what to look at, in the same order on every rank.
            group: all ranks. Collective.
        """
        names, medians = list(operations), self.medians()
        # By MAX: a negative value is a smallest one, and minus infinity says nothing.
        values = [
            -math.inf
            if name not in medians
            else medians[name]
            if name in self._local
            else -medians[name]
            for name in names
        ]
        together = torch.tensor(values, dtype=torch.float64, device=device_of(group))
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        ratios = {
            name: abs(value)
            for name, value in zip(names, together.tolist(), strict=True)
            if value != -math.inf
        }
        return {
            name: ratio
            for name, ratio in ratios.items()
            if not self._limits.low <= ratio <= self._limits.high
        }
