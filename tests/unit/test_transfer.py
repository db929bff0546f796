"""Which copy of an expert is taken for which slot."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megatron_resilient.comm.transfer import keep_places, plan_fetches


@st.composite
def moves(draw):
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts = list(range(draw(st.integers(slots, 8))))
    rows = st.permutations(experts).map(lambda order: order[:slots])
    held = draw(st.lists(rows, min_size=ranks, max_size=ranks))
    known = sorted({expert for own in held for expert in own})
    wanted = [draw(st.permutations(known)) for _ in range(ranks)]
    return held, [own[:slots] for own in wanted]


@given(moves())
def test_each_slot_gets_its_expert_from_a_holder(move):
    held, wanted = move
    fetches = plan_fetches(held, wanted)
    assert [fetch.target for fetch in fetches] == [
        (rank, slot) for rank, own in enumerate(wanted) for slot in range(len(own))
    ]
    for fetch in fetches:
        (giver, source), (taker, target) = fetch.source, fetch.target
        assert held[giver][source] == wanted[taker][target] == fetch.expert
        assert giver == taker or fetch.expert not in held[taker]


def test_holders_share_the_giving():
    fetches = plan_fetches([[0], [0], [1], [1], [1], [1]], [[0], [0], [0], [0], [0], [0]])
    given_by = Counter(f.source[0] for f in fetches if f.source[0] != f.target[0])
    assert given_by == {0: 2, 1: 2}


def test_given_sources_are_taken():
    fetches = plan_fetches([[0], [0], [1]], [[0], [0], [0]], sources={(0, 2): 1})
    assert fetches[2].source == (1, 0)


def test_an_expert_that_nobody_holds():
    with pytest.raises(KeyError):
        plan_fetches([[0]], [[1]])


@given(moves())
def test_experts_that_stay_keep_their_slot(move):
    held, wanted = move
    for before, after, asked in zip(held, keep_places(held, wanted), wanted, strict=True):
        assert sorted(after) == sorted(asked)
        for slot, expert in enumerate(before):
            if expert in asked:
                assert after[slot] == expert


def test_keep_places_by_hand():
    assert keep_places([[4, 7, 1]], [[1, 2, 7]]) == [[2, 7, 1]]
