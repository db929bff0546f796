import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.replication import allocate_replicas, slot_imbalance
from megatron_resilient.errors import PlanError, UnrecoverablePlanError


@st.composite
def problems(draw):
    loads = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
    slots = draw(st.integers(len(loads), 8 * len(loads)))
    return loads, slots, draw(st.integers(1, 6))


@given(problems())
def test_counts_fill_the_slots_keep_the_minimum_and_follow_the_load(problem):
    loads, slots, min_replicas = problem
    got = allocate_replicas(loads, slots, min_replicas)
    assert sum(got.replicas) == slots
    assert got.effective_min_replicas == min(min_replicas, slots // len(loads))
    assert min(got.replicas) >= got.effective_min_replicas
    by_load = [got.replicas[e] for e in sorted(range(len(loads)), key=lambda e: (loads[e], e))]
    assert by_load == sorted(by_load)


@given(problems())
def test_equation_one_as_printed(problem):
    """Lazarus, equation 1, in exact fractions and over the sums as they are written there."""
    loads, slots, min_replicas = problem
    if not sum(loads):
        return
    minimum = min(min_replicas, slots // len(loads))
    order = sorted(range(len(loads)), key=lambda e: (loads[e], e))
    counts: list[int] = []
    for position, expert in enumerate(order[:-1]):
        rest = sum(loads[e] for e in order[position:])
        counts.append(
            max(math.floor(Fraction(loads[expert], rest) * (slots - sum(counts))), minimum)
        )
    counts.append(slots - sum(counts))
    got = allocate_replicas(loads, slots, min_replicas)
    assert [got.replicas[e] for e in order] == counts


def test_minimum_is_lowered_only_as_far_as_the_slots_force_it():
    """The paper's GPT-L, 16 experts: two replicas fit into 6 nodes of 6 slots, not into 5."""
    assert allocate_replicas([1] * 16, 36, 2).effective_min_replicas == 2
    assert allocate_replicas([1] * 16, 30, 2).effective_min_replicas == 1
    assert allocate_replicas([1] * 16, 47, 3).effective_min_replicas == 2


def test_no_tokens_at_all_are_shared_evenly():
    assert sorted(allocate_replicas([0, 0, 0], 8, 1).replicas) == [2, 3, 3]


def test_one_expert_takes_everything():
    assert allocate_replicas([0], 7, 2).replicas == (7,)


def test_fractional_and_large_loads_are_exact():
    thirds = allocate_replicas([1 / 3, Fraction(1, 3), 0.5], 12, 1)
    assert sum(thirds.replicas) == 12
    big = allocate_replicas([10**30, 3 * 10**30], 8, 1)
    assert big.replicas == (2, 6)


@pytest.mark.parametrize("load", [-1, float("nan"), float("inf")])
def test_impossible_loads_are_named(load):
    with pytest.raises(PlanError, match="load of expert 1"):
        allocate_replicas([1, load], 8)


def test_too_few_slots_and_bad_minimum():
    with pytest.raises(UnrecoverablePlanError, match="3 experts do not fit into 2 slots"):
        allocate_replicas([1, 2, 3], 2)
    with pytest.raises(PlanError, match="min_replicas is 0"):
        allocate_replicas([1], 2, 0)
    with pytest.raises(PlanError, match="at least one expert"):
        allocate_replicas([], 2)


def test_slot_imbalance():
    assert slot_imbalance([30, 10], [3, 1]) == 1
    assert slot_imbalance([30, 10], [2, 2]) == 1.5
    assert slot_imbalance([0, 0], [2, 2]) == 1
