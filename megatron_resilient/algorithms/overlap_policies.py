"""Other ways to run an MoE layer, to compare with: no overlap, and one stream for all traffic.

Both know nothing of orders on a stream of their own for the links inside a node.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import (
    ALLGATHER,
    COMBINE,
    DISPATCH,
    EXPERT,
    REDUCESCATTER,
)

FloatArray = npt.NDArray[np.float64]


def one_stream_times(
    costs: Sequence[StageCosts], max_degree: int, slice_ms: FloatArray | float = 0.0
) -> FloatArray:
    """Returns times with all communication on one stream, as PipeMoE and Tutel pipeline it.

    The stream runs dispatch and AllGather of chunk after chunk, then the gradient slice, then
    ReduceScatter and combine of chunk after chunk; experts overlap with it. FSMoE (arXiv
    2501.10714), section 6.1, compares itself to these, and calls its own variant without overlap
    of links "No-IIO".

    Args:
        costs: Of each pass.
        max_degree: Most chunks.
        slice_ms: The gradient slice, [B] or for all.

    Returns:
        Milliseconds by degree from 1, [B, max_degree].
    """
    alpha = np.array([own.alpha_ms for own in costs]).T.reshape(5, -1)
    whole = np.array([own.whole_ms for own in costs]).T.reshape(5, -1)
    times = np.empty((len(costs), max_degree))
    for degree in range(1, max_degree + 1):
        chunk = alpha + whole / degree
        sends, returns = chunk[DISPATCH] + chunk[ALLGATHER], chunk[REDUCESCATTER] + chunk[COMBINE]
        compute = np.zeros(len(costs))
        computed = []
        for index in range(degree):
            compute = np.maximum(compute, (index + 1) * sends) + chunk[EXPERT]
            computed.append(compute)
        free = degree * sends + slice_ms
        for done in computed:
            free = np.maximum(free, done) + returns
        times[:, degree - 1] = free
    return times


def sequential_times(costs: Sequence[StageCosts]) -> FloatArray:
    """Returns the times of passes in which nothing overlaps and nothing is cut, [B]."""
    return np.array([own.sequential_ms for own in costs])
