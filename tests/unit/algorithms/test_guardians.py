"""Guardians of shards are on other nodes, wherever that is possible for all at once."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.guardians import guardian_shift


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_the_smallest_shift_that_takes_every_rank_to_another_node(nodes):
    ranks = len(nodes)
    good = [
        shift
        for shift in range(1, ranks)
        if all(nodes[i] != nodes[(i + shift) % ranks] for i in range(ranks))
    ]
    assert guardian_shift(nodes) == (good[0] if good else None)


def test_nodes_of_several_ranks_in_a_row():
    assert guardian_shift("aabbcc") == 2
    assert guardian_shift("abc") == 1
    assert guardian_shift("aab") is None  # two ranks cannot both be guarded by one
    assert guardian_shift("a") is None


@given(st.integers(2, 6), st.integers(1, 4))
def test_equal_nodes_always_have_guardians(nodes, each):
    assert guardian_shift([str(n) for n in range(nodes) for _ in range(each)]) == each
