"""Which experts a save holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.expert_selection import POLICIES, select, select_two_levels
from megatron_resilient.errors import PlanError


@st.composite
def sizes(draw):
    experts = draw(st.integers(1, 12))
    k_snapshot = draw(st.integers(1, experts))
    return experts, k_snapshot, draw(st.integers(1, k_snapshot))


def test_the_papers_example():
    # MoC-System, Fig. 4: 3 experts, 4 MoE layers, K = 1.
    assert select("sequential", 0, 4, 3, 1) == [(0,), (1,), (2,), (0,)]
    assert select("sequential", 1, 4, 3, 1) == [(1,), (2,), (0,), (1,)]


@given(sizes(), st.integers(0, 50), st.integers(1, 5))
def test_sequential_comes_to_every_expert_at_both_levels(sizes, first, layers):
    experts, k_snapshot, k = sizes
    seen = [set() for _ in range(layers)]
    for save in range(first, first + -(-experts // k)):
        levels = select_two_levels("sequential", save, layers, experts, k_snapshot, k)
        for layer in range(layers):
            assert len(set(levels.snapshot[layer])) == k_snapshot
            assert len(set(levels.persist[layer])) == k
            assert set(levels.persist[layer]) <= set(levels.snapshot[layer])
            assert list(levels.snapshot[layer]) == sorted(levels.snapshot[layer])
            seen[layer] |= set(levels.persist[layer])
    assert all(each == set(range(experts)) for each in seen)


@given(st.integers(2, 12), st.integers(0, 30))
def test_sequential_with_one_expert_spreads_over_the_experts(experts, save):
    chosen = [expert for (expert,) in select("sequential", save, experts, experts, 1)]
    assert sorted(chosen) == list(range(experts))


@given(st.data(), sizes())
def test_load_aware_takes_those_with_most_unsaved_tokens(data, sizes):
    experts, k_snapshot, k = sizes
    counts = st.lists(st.integers(0, 5), min_size=experts, max_size=experts)
    snapshot, persist = ([data.draw(counts) for _ in range(2)] for _ in range(2))
    levels = select_two_levels("load-aware", 3, 2, experts, k_snapshot, k, snapshot, persist)
    assert levels.persist == select("load-aware", 3, 2, experts, k, persist)
    for layer in range(2):
        chosen, wider = set(levels.persist[layer]), set(levels.snapshot[layer])
        ranked = sorted(range(experts), key=lambda e: (-persist[layer][e], e))
        assert chosen == set(ranked[:k])
        assert chosen <= wider
        assert len(wider) == k_snapshot
        rest = set(range(experts)) - wider
        extra = wider - chosen
        assert all((-snapshot[layer][a], a) < (-snapshot[layer][b], b) for a in extra for b in rest)


def test_load_aware_breaks_ties_by_number():
    assert select("load-aware", 0, 1, 4, 2, [[7, 7, 9, 7]]) == [(0, 2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_experts_are_all_experts(policy):
    unsaved = [[1, 2, 3]] * 2
    assert select(policy, 5, 2, 3, 3, unsaved) == [(0, 1, 2)] * 2


def test_full_ignores_k():
    assert select("full", 5, 1, 3, 1) == [(0, 1, 2)]
    assert select_two_levels("full", 5, 1, 3, 1, 2) == ([(0, 1, 2)], [(0, 1, 2)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("random", 0, 1, 4, 1), "use one of"),
        (("sequential", -1, 1, 4, 1), "negative"),
        (("sequential", 0, 1, 4, 0), "0 of 4"),
        (("sequential", 0, 1, 4, 5), "5 of 4"),
        (("load-aware", 0, 1, 4, 1), "unsaved tokens of 1 layers x 4 experts"),
        (("load-aware", 0, 1, 4, 1, [[1, 2, 3]]), "unsaved tokens"),
    ],
)
def test_what_cannot_be_is_refused(arguments, says):
    with pytest.raises(PlanError, match=says):
        select(*arguments)


def test_more_to_persist_than_in_the_snapshot_is_refused():
    with pytest.raises(PlanError, match="not in the snapshot"):
        select_two_levels("sequential", 0, 1, 4, 1, 2)


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (16, 8), (64, 8), (256, 32)])
def test_sequential_spreads_over_writers_that_hold_one_expert_of_each_layer(experts, k):
    layers = 24
    for save in range(experts // k):
        chosen = select("sequential", save, layers, experts, k)
        by_writer = [sum(expert in own for own in chosen) for expert in range(experts)]
        assert max(by_writer) == layers * k / experts


def test_of_a_wider_snapshot_the_others_are_written_next():
    first, second = (select_two_levels("sequential", save, 1, 8, 4, 2) for save in (0, 1))
    assert first == ([(0, 1, 4, 5)], [(0, 4)])
    assert second.persist == [(1, 5)]
