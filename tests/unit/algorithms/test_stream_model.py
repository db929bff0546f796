import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_resilient.algorithms.stream_model import (
    ALLGATHER,
    COMBINE,
    DISPATCH,
    EXPERT,
    ORDERS,
    REDUCESCATTER,
    simulate,
)
from tests.support import overlap_oracles as oracles

# Multiples of a quarter add up exactly, so that ties are ties in both ways of computing.
MILLISECONDS = st.integers(0, 40).map(lambda quarters: quarters / 4)


@st.composite
def layers(draw, max_degree=6):
    degree = draw(st.integers(1, max_degree))
    return [[draw(MILLISECONDS) for _ in range(degree)] for _ in range(5)]


def padded(layer, columns):
    return np.array([stage + [0.0] * (columns - len(stage)) for stage in layer])


@given(st.lists(layers(), min_size=1, max_size=5), st.sampled_from(ORDERS), MILLISECONDS)
def test_as_events_one_by_one_say(batch, order, slice_ms):
    columns = max(len(own[0]) for own in batch)
    durations = np.stack([padded(own, columns) for own in batch], axis=1)
    got = simulate(durations, [len(own[0]) for own in batch], order, slice_ms)
    for row, layer in enumerate(batch):
        times, makespan = oracles.play(layer, order, slice_ms)
        assert got.makespan_ms[row] == makespan
        for (stage, chunk), (start, end) in times.items():
            if stage == "slice":
                assert (got.slice_starts[row], got.slice_ends[row]) == (start, end)
            else:
                assert (got.starts[stage, row, chunk], got.ends[stage, row, chunk]) == (start, end)


@given(layers(), st.sampled_from(ORDERS), MILLISECONDS)
@example([[1.0, 1.0]] * 5, "scatter-first", 3.0)
def test_streams_do_one_thing_at_a_time_and_stages_follow_each_other(layer, order, slice_ms):
    durations = np.array(layer)[:, None, :]
    degree = len(layer[0])
    got = simulate(durations, [degree], order, slice_ms)
    starts, ends = got.starts[:, 0], got.ends[:, 0]
    assert (starts[1:] >= ends[:-1]).all()
    inter = [*zip(starts[DISPATCH], ends[DISPATCH], strict=True)]
    inter += [(got.slice_starts[0], got.slice_ends[0])]
    inter += [*zip(starts[COMBINE], ends[COMBINE], strict=True)]
    intra = [
        *zip(starts[ALLGATHER], ends[ALLGATHER], strict=True),
        *zip(starts[REDUCESCATTER], ends[REDUCESCATTER], strict=True),
    ]
    compute = [*zip(starts[EXPERT], ends[EXPERT], strict=True)]
    for stream in (inter, sorted(intra), compute):
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(stream))


@given(layers(5), MILLISECONDS)
def test_no_order_beats_the_best_of_all_interleavings(layer, slice_ms):
    degree = len(layer[0])
    best = min(
        oracles.makespan_of_order(layer, own, slice_ms) for own in oracles.interleavings(degree)
    )
    for order in ORDERS:
        got = simulate(np.array(layer)[:, None, :], [degree], order, slice_ms)
        assert got.makespan_ms[0] >= best


@given(layers(), st.sampled_from(ORDERS), MILLISECONDS)
def test_a_slice_lifts_the_floor_and_nothing_else(layer, order, slice_ms):
    """What phase_options counts on: max(floor, all traffic between nodes + the slice)."""
    durations, degree = np.array(layer)[:, None, :], [len(layer[0])]
    floor = simulate(durations, degree, order).makespan_ms[0]
    traffic = durations[DISPATCH].sum() + durations[COMBINE].sum()
    got = simulate(durations, degree, order, slice_ms).makespan_ms[0]
    assert got == max(floor, traffic + slice_ms)


def test_one_chunk_is_the_sum_of_its_stages():
    durations = np.array([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(5, 1, 1)
    for order in ORDERS:
        assert simulate(durations, [1], order).makespan_ms[0] == 15.0


@pytest.mark.parametrize(
    ("order", "intra"),
    [
        ("gather-first", [(ALLGATHER, 0), (ALLGATHER, 1), (ALLGATHER, 2), (REDUCESCATTER, 0)]),
        ("scatter-first", [(ALLGATHER, 0), (ALLGATHER, 1), (REDUCESCATTER, 0), (ALLGATHER, 2)]),
        ("largest-first", [(ALLGATHER, 0), (ALLGATHER, 1), (ALLGATHER, 2), (REDUCESCATTER, 0)]),
    ],
)
def test_orders(order, intra):
    """AllGathers take 4, ReduceScatters 3: chunk 0 is computed while chunk 1 is gathered."""
    durations = np.repeat(np.array([1.0, 4.0, 4.0, 3.0, 1.0])[:, None, None], 3, axis=2)
    got = simulate(durations, [3], order)
    done = sorted(
        (got.starts[stage, 0, chunk], stage, chunk)
        for stage in (ALLGATHER, REDUCESCATTER)
        for chunk in range(3)
    )
    assert [(stage, chunk) for _, stage, chunk in done][:4] == intra
