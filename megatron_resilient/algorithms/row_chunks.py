"""Which rows belong to which chunk, where every pair of a sender and a slot is cut for itself.

A sender has n rows for a slot, in an order that both ends know. The share from F to G of them are
the rows from floor(n F) to floor(n G): every row is in exactly one chunk, whatever the sizes are,
nothing is padded, and both ends reckon the same from n alone. Shares are exact fractions, so that
boundaries of two divisions of the same rows that are meant to be one are one.

FSMoE (arXiv 2501.10714), section 4, cuts padded, equal chunks.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_resilient.errors import PlanError

IntArray = npt.NDArray[np.int64]
Cuts = tuple[Fraction, ...]

# Floating-point shares are taken for the nearest fraction with so small a denominator.
_LARGEST_DENOMINATOR = 1 << 16


def even_cuts(degree: int) -> Cuts:
    """Returns the boundaries of `degree` equal chunks, from 0 to 1.

    Raises:
        PlanError: fewer than one chunk.
    """
    if degree < 1:
        raise PlanError(f"a pass of {degree} chunks: there must be at least 1")
    return tuple(Fraction(chunk, degree) for chunk in range(degree + 1))


def cuts_of(shares: Sequence[float]) -> Cuts:
    """Returns the boundaries of chunks with these shares, from 0 to 1.

    Args:
        shares: of every chunk, positive, with the sum 1 (to one part in a thousand).

    Raises:
        PlanError: they are not.
    """
    if not shares or not all(share > 0 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        raise PlanError(f"shares of chunks {tuple(shares)}: each must be positive, their sum 1")
    inner = np.cumsum(shares)[:-1].tolist()
    cuts = (
        Fraction(0),
        *(Fraction(cut).limit_denominator(_LARGEST_DENOMINATOR) for cut in inner),
        Fraction(1),
    )
    if any(start >= stop for start, stop in pairwise(cuts)):
        raise PlanError(f"shares of chunks {tuple(shares)}: one is too small")
    return cuts


def joint_cuts(one: Cuts, other: Cuts) -> Cuts:
    """Returns the boundaries of both: the pieces of which the chunks of either consist."""
    return tuple(sorted({*one, *other}))


def pieces_of(cuts: Cuts, joint: Cuts) -> tuple[range, ...]:
    """Returns the pieces of each chunk.

    Args:
        cuts: boundaries of the chunks.
        joint: boundaries of the pieces, all of `cuts` among them.
    """
    place = {cut: index for index, cut in enumerate(joint)}
    return tuple(range(place[start], place[stop]) for start, stop in pairwise(cuts))


def cut_rows(rows: IntArray, cuts: Cuts) -> IntArray:
    """Returns how many of the rows of each pair each part gets; O(pairs * parts).

    Args:
        rows: of each pair, of any shape [...].
        cuts: boundaries of P parts.

    Returns:
        [P, ...]; sums over P to `rows`.
    """
    ends = np.stack([rows * cut.numerator // cut.denominator for cut in cuts])
    return np.diff(ends, axis=0)
