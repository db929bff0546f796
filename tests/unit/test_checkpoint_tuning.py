"""K of snapshots and the interval of saves from measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.checkpoint_tuning import (
    overhead,
    save_interval,
    snapshot_size,
)
from megatron_resilient.errors import PlanError


@given(
    st.integers(1, 64),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.floats(1e6, 1e10),
    st.floats(0.01, 100),
    st.data(),
)
def test_k_is_the_largest_without_a_stall(experts, dense, each, bandwidth, seconds, data):
    at_least = data.draw(st.integers(1, experts))

    def size(k):
        return dense + k * each

    chosen = snapshot_size(size, experts, bandwidth, seconds, at_least)
    fits = [k for k in range(at_least, experts + 1) if size(k) <= bandwidth * seconds]
    assert chosen.k == max(fits, default=at_least)
    stall = size(chosen.k) / bandwidth - seconds
    assert chosen.stall_seconds == pytest.approx(max(0.0, stall), abs=1e-9)


@given(st.floats(0, 100), st.floats(0.1, 10), st.floats(1e-4, 0.1), st.floats(0, 50))
def test_no_other_interval_costs_less(persist, step, faults, stall):
    interval = save_interval(persist, step, faults, stall)
    shortest = max(1, -(-persist // step))
    assert interval >= shortest
    best = overhead(stall / step, interval, faults)
    for other in range(int(shortest), int(shortest) + 2000):
        assert best <= overhead(stall / step, other, faults) * (1 + 1e-9)


def test_without_a_stall_storage_is_the_bound():
    assert save_interval(10.1, 1.0, 0.001) == 11
    assert save_interval(0.0, 1.0, 0.0) == 1


def test_where_faults_do_not_come_saves_are_rare():
    assert save_interval(1.0, 1.0, 0.0, 5.0, longest=500) == 500


@pytest.mark.parametrize(
    "arguments", [(1.0, 0.0, 0.1), (-1.0, 1.0, 0.1), (1.0, 1.0, -0.1), (1.0, 1.0, 0.1, -1.0)]
)
def test_impossible_times_are_refused(arguments):
    with pytest.raises(PlanError):
        save_interval(*arguments)


@pytest.mark.parametrize(("bandwidth", "seconds"), [(0, 1), (1, 0), (float("inf"), 1)])
def test_impossible_copies_are_refused(bandwidth, seconds):
    with pytest.raises(PlanError):
        snapshot_size(float, 4, bandwidth, seconds)
    with pytest.raises(PlanError):
        snapshot_size(float, 4, 1, 1, at_least=5)
