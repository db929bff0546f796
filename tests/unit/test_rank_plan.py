"""Plans that training can carry out: every rank's experts distinct, every expert somewhere."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from megatron_resilient.algorithms.rank_plan import plan_layers, without_repeats
from megatron_resilient.algorithms.token_assignment import least_imbalance
from megatron_resilient.errors import PlanError


@st.composite
def domains(draw):
    ranks = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 9))
    slots = draw(st.integers(-(-experts // ranks), experts))
    load = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    return draw(st.lists(load, min_size=1, max_size=3)), ranks, slots


@given(domains(), st.integers(1, 4), st.integers(1, 3))
def test_every_expert_has_a_slot_and_no_rank_has_one_twice(domain, ranks_per_node, minimum):
    loads, ranks, slots = domain
    holdings = plan_layers(loads, ranks, ranks_per_node, slots, minimum)
    assert len(holdings) == len(loads)
    for holding, layer in zip(holdings, loads, strict=True):
        assert [len(own) for own in holding] == [slots] * ranks
        assert all(own == sorted(set(own)) for own in holding)
        assert {expert for own in holding for expert in own} == set(range(len(layer)))


@given(domains())
def test_experts_keep_their_minimum_of_replicas(domain):
    loads, ranks, slots = domain
    for holding, layer in zip(plan_layers(loads, ranks, 1, slots, 2), loads, strict=True):
        kept = min(2, ranks, ranks * slots // len(layer))
        for expert in range(len(layer)):
            assert sum(expert in own for own in holding) >= kept


def test_a_hot_expert_is_everywhere_and_ranks_come_out_even():
    loads = [10_000, *[100] * 15]
    (holding,) = plan_layers([loads], 8, 1, 4, 1)
    assert all(0 in own for own in holding)
    assert least_imbalance(np.array(loads), np.array(holding)) < 1.01


def test_repeats_give_way_to_the_hottest_experts():
    assert without_repeats([[0, 0, 0], [1, 2, 3]], [90, 5, 40, 30]) == [[0, 2, 3], [1, 2, 3]]


@given(domains())
def test_distinct_holdings_stay(domain):
    loads, ranks, slots = domain
    for holding, layer in zip(plan_layers(loads, ranks, 1, slots, 1), loads, strict=True):
        assert without_repeats(holding, layer) == holding


def test_too_few_slots():
    with pytest.raises(PlanError, match="5 experts do not fit into 4 slots"):
        plan_layers([[1] * 5], 2, 1, 2, 1)
