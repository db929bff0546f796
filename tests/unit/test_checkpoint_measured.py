"""Choices from what ranks measured: K of snapshots and the interval of saves."""

import pytest

from megatron_resilient.checkpoint.manifest import ArrayInfo
from megatron_resilient.mcore.checkpointing.layout import Layout
from megatron_resilient.mcore.checkpointing.tuning import Measured, interval, snapshot_experts

EXPERTS, RANKS = 8, 4
ELEMENTS = 1_000_000  # of an expert's only array: 4 MB, so 32 MB of experts, 8 MB a rank
LAYOUT = Layout(
    held=[[] for _ in range(RANKS)],
    arrays={f"expert/1/{e}/0/w": ArrayInfo((ELEMENTS,), {"main": "F32"}) for e in range(EXPERTS)}
    | {"dense/0.0/0/w": ArrayInfo((2 * ELEMENTS,), {"main": "F32"})},
    placement={},
    layers=[1],
    experts=EXPERTS,
)


def told(**measured):
    """What ranks that measured the same tell each other."""
    return [RANKS * each for each in Measured(**measured).told()]


def copying(free_seconds):
    """A rank copied 10 MB in 10 ms: 1 GB/s."""
    return told(
        step_seconds=0.5, free_seconds=free_seconds, copy_seconds=0.01, copy_bytes=10_000_000
    )


@pytest.mark.parametrize(
    ("free_seconds", "k"),
    [
        # A rank copies 2 MB of dense state and 1 MB for each K, in 80 % of the time that is free.
        (0.0125, 8),
        (0.0124, 7),
        (0.00626, 3),
        (0.001, 1),
    ],
)
def test_a_snapshot_takes_what_fits_beside_a_step(free_seconds, k):
    assert snapshot_experts(copying(free_seconds), LAYOUT, persist=1) == k


def test_a_snapshot_never_takes_less_than_is_written():
    assert snapshot_experts(copying(0.001), LAYOUT, persist=3) == 3


def test_nothing_is_chosen_before_anything_was_measured():
    assert snapshot_experts(Measured().told(), LAYOUT, persist=2) == 2
    assert interval(Measured().told(), RANKS, 1.0, 0.1, 600.0) is None


def test_the_interval_follows_what_ranks_measured():
    # Steps of 0.5 s, a stall of 0.1 s (0.2 steps), a fault every 1,000 s (2,000 steps).
    assert interval(told(step_seconds=0.5), RANKS, 2.0, 0.1, 1000.0) == round(
        (2 * 0.2 * 2000) ** 0.5
    )
    # No more often than a save takes.
    assert interval(told(step_seconds=0.5), RANKS, 50.0, 0.1, 1000.0) == 100


def test_step_times_are_a_moving_mean(monkeypatch):
    times = iter([1.0, 2.0, 3.0, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    measured = Measured()
    for _ in range(3):
        measured.between_steps()
    assert measured.step_seconds == pytest.approx(1.0)
    measured.between_steps()
    assert measured.step_seconds == pytest.approx(0.8 * 1.0 + 0.2 * 10.0)
