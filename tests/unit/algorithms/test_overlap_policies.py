import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.four_cases import CASES, four_case_time
from megatron_resilient.algorithms.overlap_policies import one_stream_times, sequential_times
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import simulate

TIMES = st.integers(1, 40).map(float)


def exact(a2a, gather, scatter, expert, degree, slice_ms):
    chunk = np.array([a2a, gather, expert, scatter, a2a])[:, None, None]
    durations = np.repeat(chunk, degree, axis=2)
    return float(simulate(durations, [degree], "gather-first", slice_ms).makespan_ms[0])


@given(TIMES, TIMES, TIMES, TIMES, st.integers(1, 8), st.integers(0, 200).map(float))
def test_four_cases_are_exact_where_both_links_inside_nodes_are_alike_and_never_above(
    a2a, gather, scatter, expert, degree, slice_ms
):
    case, time = four_case_time(a2a, gather, gather, expert, degree, slice_ms)
    assert case in CASES
    assert time == exact(a2a, gather, gather, expert, degree, slice_ms)
    _, time = four_case_time(a2a, gather, scatter, expert, degree, slice_ms)
    assert time <= exact(a2a, gather, scatter, expert, degree, slice_ms)


@pytest.mark.parametrize(
    ("case", "stages", "degree", "slice_ms"),
    [
        (1, (5.0, 2.0, 2.0, 1.0), 4, 30.0),
        (1, (1.0, 2.0, 2.0, 9.0), 4, 60.0),
        (2, (5.0, 2.0, 2.0, 20.0), 4, 0.0),
        (2, (1.0, 2.0, 2.0, 9.0), 4, 3.0),
        (3, (5.0, 2.0, 2.0, 1.0), 4, 0.0),
        (4, (1.0, 9.0, 9.0, 2.0), 4, 0.0),
    ],
)
def test_each_case_where_it_is_exact(case, stages, degree, slice_ms):
    got, time = four_case_time(*stages, degree, slice_ms)
    assert got == case
    assert time == exact(*stages, degree, slice_ms)


COSTS = st.builds(StageCosts, st.tuples(*[st.floats(0, 2)] * 5), st.tuples(*[st.floats(0, 60)] * 5))


@given(COSTS, st.floats(0, 30))
def test_policies_and_plans_agree_uncut_and_plans_are_never_slower(costs, slice_ms):
    one_stream = one_stream_times([costs], 6)[0]
    assert one_stream[0] == pytest.approx(sequential_times([costs])[0])
    options = phase_options([costs], 6)[0]
    best = options.choose()
    assert best.by_degree_ms[0] == pytest.approx(one_stream[0])
    assert all(
        ours <= other * (1 + 1e-9)
        for ours, other in zip(best.by_degree_ms, one_stream, strict=True)
    )
    with_slice = one_stream_times([costs], 6, slice_ms)[0]
    assert (with_slice >= one_stream - 1e-9).all()
    assert options.choose(slice_ms).predicted_ms <= with_slice.min() * (1 + 1e-9)


def test_one_stream_overlaps_experts_with_traffic():
    costs = StageCosts((0.0,) * 5, (4.0, 4.0, 8.0, 4.0, 4.0))
    # Half of everything a chunk: sends until 4 and 8, experts until 8 and 12, returns until 16.
    assert one_stream_times([costs], 2)[0].tolist() == [24.0, 16.0]
