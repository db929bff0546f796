"""The exact time of one MoE layer that is cut into chunks, on three streams.

A layer has five stages, and chunk i goes through them one after the other: dispatch (between
nodes), AllGather (inside a node), experts, ReduceScatter (inside), combine (between nodes). Three
streams work at once, each on one operation at a time, which is never interrupted:

* inter: all dispatches, then (in the backward pass) a slice of the gradient, then all combines;
* intra: AllGathers and ReduceScatters, each kind by chunk, merged in one of `ORDERS`;
* compute: the experts of one chunk after the other.

FSMoE (arXiv 2501.10714), section 4.2, describes the streams with the first of the orders, and four
formulas for their time; here the streams are played through.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

STAGES = ("dispatch", "allgather", "expert", "reducescatter", "combine")
DISPATCH, ALLGATHER, EXPERT, REDUCESCATTER, COMBINE = range(5)

# How the intra stream chooses; of equally good ones the first is taken.
# gather-first: all AllGathers, then all ReduceScatters (FSMoE's).
# scatter-first: a ReduceScatter as soon as its experts are done, AllGathers else.
# largest-first: of the operations that could start, the longer one.
ORDERS = ("gather-first", "scatter-first", "largest-first")


@dataclass(frozen=True)
class Timeline:
    """When everything ends in B layers of up to R chunks, in milliseconds.

    Attributes:
        ends: By stage and chunk, [5, B, R]; of no meaning for chunks that a layer does not have.
        starts: The same, [5, B, R].
        slice_starts: Of the gradient slice: when the last dispatch has ended, [B].
        slice_ends: [B].
        makespan_ms: When the last combine has ended, [B].
    """

    ends: FloatArray
    starts: FloatArray
    slice_starts: FloatArray
    slice_ends: FloatArray
    makespan_ms: FloatArray


def simulate(
    durations_ms: FloatArray,
    degrees: IntArray | Sequence[int],
    order: str,
    slice_ms: FloatArray | float = 0.0,
) -> Timeline:
    """Plays the three streams through, for many layers at once.

    2 R vectorised steps over B layers.

    Args:
        durations_ms: Of every stage of every chunk, [5, B, R]; zero for chunks >= the degree.
        degrees: Chunks of every layer, 1 to R, [B].
        order: One of `ORDERS`.
        slice_ms: The gradient slice between dispatches and combines, [B] or for all.

    Returns:
        All starts and ends.
    """
    assert order in ORDERS, order
    degree = np.asarray(degrees, dtype=np.int64)
    ends = np.zeros_like(durations_ms)
    ends[DISPATCH] = durations_ms[DISPATCH].cumsum(axis=1)
    _play_intra_and_compute(durations_ms, ends, degree, order)
    slice_starts = ends[DISPATCH, :, -1].copy()
    slice_ends = slice_starts + slice_ms
    free = slice_ends
    for chunk in range(durations_ms.shape[2]):
        free = np.maximum(free, ends[REDUCESCATTER, :, chunk]) + durations_ms[COMBINE, :, chunk]
        ends[COMBINE, :, chunk] = free
    return Timeline(ends, ends - durations_ms, slice_starts, slice_ends, free)


def _play_intra_and_compute(
    durations: FloatArray, ends: FloatArray, degree: IntArray, order: str
) -> None:
    """Fills in the ends of AllGathers, experts and ReduceScatters."""
    _, layers, chunks = durations.shape
    # Deepest layers first: those that still have something to do are then a prefix.
    rows = np.argsort(-degree, kind="stable")
    left = degree[rows]
    # One column more than there are chunks: the chunk after the last, which is never ready, and a
    # place for what a step does not write. Arrays are flat, as taking from those is cheaper.
    columns = chunks + 1
    first = np.arange(layers) * columns
    ag_ms, expert_ms, rs_ms = (
        np.pad(durations[stage][rows], ((0, 0), (0, 1))).ravel()
        for stage in (ALLGATHER, EXPERT, REDUCESCATTER)
    )
    there = np.arange(columns) < left[:, None]
    dispatched = np.pad(ends[DISPATCH][rows], ((0, 0), (0, 1)))
    ag_ready = np.where(there, dispatched, np.inf).ravel()
    rs_ready = np.full(layers * columns, np.inf)
    ag_end, rs_end = np.zeros(layers * columns), np.zeros(layers * columns)
    ag, rs = first.copy(), first.copy()  # the next chunk of each kind, as an index
    intra, compute = np.zeros(layers), np.zeros(layers)  # when each stream is free
    trash = first + chunks
    going = layers
    for step in range(2 * int(left.max(initial=0))):
        still = int(np.searchsorted(-2 * left, -step))  # layers with more than `step` operations
        if still < going:
            going = still
            ag, rs, trash = ag[:going], rs[:going], trash[:going]
            intra, compute = intra[:going], compute[:going]
        ag_at, rs_at = ag_ready[ag], rs_ready[rs]
        if order == "gather-first":
            scatter = ag_at == np.inf
        else:
            now = np.maximum(intra, np.minimum(ag_at, rs_at))
            scatter = rs_at <= now
            if order == "largest-first":
                scatter &= (ag_at > now) | (rs_ms[rs] >= ag_ms[ag])
        gather = ~scatter
        intra = np.maximum(intra, np.where(scatter, rs_at, ag_at))
        intra += np.where(scatter, rs_ms[rs], ag_ms[ag])
        done = np.maximum(compute, intra) + expert_ms[ag]
        compute = np.where(gather, done, compute)
        own_ag, own_rs = np.where(gather, ag, trash), np.where(scatter, rs, trash)
        ag_end[own_ag] = intra
        rs_end[own_rs] = intra
        rs_ready[own_ag] = done
        rs_ready[trash] = np.inf
        ag = ag + gather
        rs = rs + scatter
    for stage, values in ((ALLGATHER, ag_end), (EXPERT, rs_ready), (REDUCESCATTER, rs_end)):
        ends[stage][rows] = values.reshape(layers, columns)[:, :chunks]
    ends[EXPERT][ends[EXPERT] == np.inf] = 0.0
