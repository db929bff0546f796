"""Chunks of rows: every row is in one, both ends agree, and pieces make up the chunks of both."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.chunk_shapes import UNEVEN_SHAPES
from megatron_resilient.algorithms.row_chunks import (
    cut_rows,
    cuts_of,
    even_cuts,
    joint_cuts,
    pieces_of,
)
from megatron_resilient.errors import PlanError

DEGREES = st.integers(1, 12)
ROWS = st.lists(st.integers(0, 2**40), min_size=1, max_size=6)
SHARES = st.lists(st.integers(1, 50), min_size=1, max_size=9).map(
    lambda weights: [weight / sum(weights) for weight in weights]
)


@given(ROWS, SHARES)
def test_every_row_is_in_exactly_one_chunk(rows, shares):
    sizes = cut_rows(np.array(rows), cuts_of(shares))
    assert sizes.shape == (len(shares), len(rows))
    assert (sizes >= 0).all()
    assert sizes.sum(axis=0).tolist() == rows
    for pair, n in enumerate(rows):
        for chunk, share in enumerate(shares):
            # A share is off by the fraction that stands for it, and by one row for each end.
            assert abs(int(sizes[chunk, pair]) - share * n) <= 1 + n * 2**-14


@given(ROWS, DEGREES)
def test_equal_chunks_differ_by_a_row(rows, degree):
    sizes = cut_rows(np.array(rows), even_cuts(degree))
    assert (sizes.max(axis=0) - sizes.min(axis=0)).max() <= 1


@given(st.integers(0, 5), st.integers(0, 5), SHARES)
def test_both_ends_agree(senders, slots, shares):
    """A sender that knows its row and a receiver that knows its column cut the same."""
    counts = np.random.default_rng(3).integers(0, 99, (senders + 1, slots + 1))
    cuts = cuts_of(shares)
    whole = cut_rows(counts, cuts)
    for sender in range(senders + 1):
        assert (cut_rows(counts[sender], cuts) == whole[:, sender]).all()
    for slot in range(slots + 1):
        assert (cut_rows(counts[:, slot], cuts) == whole[:, :, slot]).all()


@given(ROWS, SHARES, DEGREES)
def test_pieces_make_up_the_chunks_of_both_passes(rows, shares, degree):
    one, other = cuts_of(shares), even_cuts(degree)
    joint = joint_cuts(one, other)
    pieces = cut_rows(np.array(rows), joint)
    for cuts in (one, other):
        chunks = pieces_of(cuts, joint)
        assert [piece for chunk in chunks for piece in chunk] == list(range(len(joint) - 1))
        together = np.stack([pieces[list(chunk)].sum(axis=0) for chunk in chunks])
        assert (together == cut_rows(np.array(rows), cuts)).all()


def test_boundaries_that_are_meant_to_be_one_are_one():
    assert len(joint_cuts(even_cuts(2), even_cuts(4))) == 5
    assert cuts_of((1 / 3, 1 / 3, 1 / 3)) == even_cuts(3)
    for shape in UNEVEN_SHAPES:
        assert all(cut.denominator <= 60 for cut in cuts_of(shape(7).tolist()))
    assert cuts_of((0.25, 0.5, 0.25)) == (0, Fraction(1, 4), Fraction(3, 4), 1)


@pytest.mark.parametrize("shares", [(), (0.5, 0.4), (1.5, -0.5), (1.0, 0.0), (1 - 1e-9, 1e-9)])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(PlanError, match="shares of chunks"):
        cuts_of(shares)


def test_no_chunks_are_refused():
    with pytest.raises(PlanError, match="at least 1"):
        even_cuts(0)
