"""How many experts a snapshot takes and how often to save (MoC-System, sections 2.1, 2.6, 5.3).

Every number comes from measurements of the caller's.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from megatron_resilient.errors import PlanError


class SnapshotSize(NamedTuple):
    """The choice of K for snapshots.

    Attributes:
        k: experts of a layer.
        stall_seconds: how much longer the copy takes than there is time; 0 unless even one expert a
            layer is too much.
    """

    k: int
    stall_seconds: float


def snapshot_size(
    bytes_of: Callable[[int], float],
    experts: int,
    bytes_per_second: float,
    seconds: float,
    at_least: int = 1,
) -> SnapshotSize:
    """Returns the largest K whose copy is hidden behind the next forward and backward.

    Args:
        bytes_of: bytes that the rank with most of them copies for a K; must not fall with K.
        experts: logical experts of a layer.
        bytes_per_second: measured, from device to host beside training.
        seconds: measured, of a forward and backward pass.
        at_least: K for persisting; it is not gone below, whatever the stall.

    Raises:
        PlanError: no bandwidth, no time, or a K that cannot be.
    """
    if not (bytes_per_second > 0 and seconds > 0 and math.isfinite(bytes_per_second)):
        raise PlanError(f"a copy at {bytes_per_second} bytes/s beside steps of {seconds} s")
    if not 1 <= at_least <= experts:
        raise PlanError(f"{at_least} of {experts} experts of a layer cannot be saved")
    low, high = at_least, experts
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of(middle) <= bytes_per_second * seconds:
            low = middle
        else:
            high = middle - 1
    return SnapshotSize(low, max(0.0, bytes_of(low) / bytes_per_second - seconds))


def overhead(stall_steps: float, interval: float, faults_per_step: float) -> float:
    """Returns the share of time that saving and redoing lost work takes (from Eq. 3, 4 and 16).

    Args:
        stall_steps: how long training waits for one save, in steps.
        interval: steps between two saves.
        faults_per_step: expected number of faults in a step.
    """
    return stall_steps / interval + faults_per_step * interval / 2


def save_interval(
    persist_seconds: float,
    step_seconds: float,
    faults_per_step: float,
    stall_seconds: float = 0.0,
    longest: int = 1_000_000,
) -> int:
    """Returns the number of steps between two saves with the least overhead.

    Never shorter than a save takes to become durable; sqrt(2 * stall / faults) where that is more.

    Args:
        persist_seconds: measured, from the end of the snapshot until the save is durable.
        step_seconds: measured.
        faults_per_step: expected number of faults in a step; 0 if none is expected.
        stall_seconds: measured, training's wait for one save.
        longest: steps; taken where faults are so rare that saving does not pay.

    Raises:
        PlanError: a time or a rate that cannot be.
    """
    if not step_seconds > 0 or min(persist_seconds, faults_per_step, stall_seconds) < 0:
        raise PlanError(
            f"a save of {persist_seconds} s (stall {stall_seconds} s), steps of {step_seconds} s "
            f"and {faults_per_step} faults a step cannot be"
        )
    shortest = max(1, math.ceil(persist_seconds / step_seconds))
    stall_steps = stall_seconds / step_seconds
    if stall_steps == 0:
        return shortest
    if 2 * stall_steps >= faults_per_step * longest**2:
        return max(shortest, longest)
    best = math.sqrt(2 * stall_steps / faults_per_step)
    near = {max(shortest, math.floor(best)), max(shortest, math.ceil(best))}
    return min(sorted(near), key=lambda steps: overhead(stall_steps, steps, faults_per_step))
