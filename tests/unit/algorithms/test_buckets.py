"""Buckets of neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.buckets import consecutive_buckets


@pytest.mark.parametrize(
    ("sizes", "least", "expected"),
    [
        ([], 5, []),
        ([7], 5, [[0]]),
        ([2, 2, 2, 2, 2], 4, [[0, 1], [2, 3], [4]]),
        ([1, 9, 1, 9, 1], 9, [[0, 1], [2, 3], [4]]),
        ([3, 3], 1, [[0], [1]]),
        ([3, 3], 6, [[0, 1]]),
        ([0, 0, 1], 1, [[0, 1, 2]]),
    ],
)
def test_buckets(sizes, least, expected):
    assert consecutive_buckets(sizes, least) == expected


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_each_item_once_and_no_bucket_longer_than_it_must_be(sizes, least):
    buckets = consecutive_buckets(sizes, least)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert sum(sizes[index] for index in bucket[:-1]) < least
    for bucket in buckets[:-1]:
        assert sum(sizes[index] for index in bucket) >= least
