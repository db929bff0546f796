"""What the overlap benchmark lets compete, and that its own model is the scheduler's."""

import pytest

from benchmarks.overlap_cases import CASES, MAX_DEGREE, NO_OVERLAP, contenders, one_stream
from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import stage_costs

PROFILE = Profile(
    a2a=LinearCost(2, 8e-5),
    allgather=LinearCost(1.5, 1e-5),
    reducescatter=LinearCost(2, 1.1e-5),
    allreduce=LinearCost(3, 8e-5),
    gemm=LinearCost(1, 1e-6),
)


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_the_chosen_schedule_is_the_best_that_is_swept(case, backward):
    rows, chosen = contenders(PROFILE, case.work, backward)
    assert len({row.name for row in rows}) == len(rows)
    by_name = {row.name: row for row in rows}
    costs = stage_costs(PROFILE, case.work, backward=backward)
    slice_ms = PROFILE.allreduce.time_ms(case.gradient_mib * 2**20) if backward else 0.0
    plan = phase_options([costs], MAX_DEGREE)[0].choose(slice_ms)
    # Two models of the same streams: the scheduler's, and one that plays any static schedule.
    assert by_name[chosen].predicted_ms == pytest.approx(plan.predicted_ms, rel=1e-9)
    swept = [row for row in rows if row.kind == "sweep"]
    assert {row.degree for row in swept} == set(range(1, MAX_DEGREE + 1))
    assert min(row.predicted_ms for row in swept) == pytest.approx(plan.predicted_ms, rel=1e-9)
    assert by_name[NO_OVERLAP].predicted_ms == pytest.approx(costs.sequential_ms + slice_ms)
    assert any(row.kind == "one stream" for row in rows)


def test_one_stream_sends_each_chunk_both_ways_and_the_slice_once():
    for degree in (1, 2, 5):
        for lanes in one_stream(degree, gradient=True).values():
            assert sorted(lanes["communication"]) == sorted(
                [
                    (stage, i)
                    for i in range(degree)
                    for stage in ("dispatch", "allgather", "reducescatter", "combine")
                ]
                + [("gradient", 0)]
            )
