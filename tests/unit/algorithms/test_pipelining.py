import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.lanes import STREAM_OF, STREAMS, planned_lanes
from megatron_resilient.algorithms.pipelining import MIN_UNEVEN_GAIN, phase_options
from megatron_resilient.algorithms.stage_costs import LayerWork, StageCosts, stage_costs
from megatron_resilient.algorithms.stream_model import ORDERS, STAGES
from megatron_resilient.errors import PlanError
from tests.support import overlap_oracles as oracles

ALPHAS = st.floats(0, 2)
WHOLES = st.floats(0, 60)
COSTS = st.builds(
    StageCosts, st.tuples(*[ALPHAS] * 5), st.tuples(*[st.floats(0.01, 60), *[WHOLES] * 4])
)


def durations(costs, fractions):
    return [
        [alpha + whole * own for own in fractions]
        for alpha, whole in zip(costs.alpha_ms, costs.whole_ms, strict=True)
    ]


@given(st.lists(COSTS, min_size=1, max_size=3), st.integers(1, 5), st.floats(0, 80))
def test_the_best_of_all_degrees_and_orders(costs, max_degree, slice_ms):
    for own, options in zip(costs, phase_options(costs, max_degree), strict=True):
        plan = options.choose(slice_ms)
        for degree in range(1, max_degree + 1):
            every = [
                oracles.play(durations(own, [1 / degree] * degree), order, slice_ms)[1]
                for order in ORDERS
            ]
            assert plan.by_degree_ms[degree - 1] == pytest.approx(min(every), rel=1e-9)
        assert plan.predicted_ms == plan.by_degree_ms[plan.degree - 1]
        # Of times that are equal but for rounding the fewest chunks are taken.
        assert plan.predicted_ms == pytest.approx(min(plan.by_degree_ms), rel=1e-9)
        assert plan.fractions == (1 / plan.degree,) * plan.degree
        # The order that is named takes what is predicted.
        named = oracles.play(durations(own, plan.fractions), plan.order, slice_ms)[1]
        assert named == pytest.approx(plan.predicted_ms, rel=1e-9)


@given(COSTS, st.floats(0, 40))
def test_uneven_chunks_are_taken_where_they_gain(costs, slice_ms):
    even = phase_options([costs], 8)[0]
    uneven = phase_options([costs], 8, uneven=True)[0]
    plan = uneven.choose(slice_ms)
    assert plan.predicted_ms <= even.choose(slice_ms).predicted_ms * (1 + 1e-9)
    assert sum(plan.fractions) == pytest.approx(1)
    assert all(own > 0 for own in plan.fractions)
    assert len(plan.fractions) == plan.degree <= 8
    if len(set(plan.fractions)) > 1:
        assert uneven.best_ms < (1 - MIN_UNEVEN_GAIN) * even.best_ms
    named = oracles.play(durations(costs, plan.fractions), plan.order, slice_ms)[1]
    assert named == pytest.approx(plan.predicted_ms, rel=1e-9)


def test_a_long_pipeline_gains_from_small_ends():
    costs = StageCosts((0.05,) * 5, (20.0, 20.0, 40.0, 20.0, 20.0))
    gain = 1 - (
        phase_options([costs], 8, uneven=True)[0].best_ms / phase_options([costs], 8)[0].best_ms
    )
    assert gain > MIN_UNEVEN_GAIN


def test_scatter_first_gains_where_the_link_between_nodes_is_full():
    """With all AllGathers first the combines start late."""
    costs = StageCosts((0.1,) * 5, (30.0, 25.0, 10.0, 25.0, 30.0))
    paper = phase_options([costs], 8, orders=["gather-first"])[0].best_ms
    assert phase_options([costs], 8)[0].best_ms < 0.95 * paper


def test_without_alpha_more_chunks_never_take_longer_and_with_much_one_is_best():
    free = StageCosts((0.0,) * 5, (10.0,) * 5)
    times = phase_options([free], 4)[0].choose().by_degree_ms
    assert times[0] == pytest.approx(50)
    assert list(times) == sorted(times, reverse=True)
    dear = StageCosts((100.0,) * 5, (10.0,) * 5)
    assert phase_options([dear], 4)[0].choose().degree == 1


def test_ties_go_to_fewer_chunks_and_the_first_order():
    idle = StageCosts((0.0,) * 5, (0.0, 0.0, 8.0, 0.0, 0.0))
    plan = phase_options([idle], 6, uneven=True)[0].choose()
    assert (plan.degree, plan.order, plan.predicted_ms) == (1, "gather-first", 8.0)


def test_equal_layers_are_done_once():
    costs = StageCosts((0.1,) * 5, (10.0,) * 5)
    first, second = phase_options([costs, costs], 4)
    assert first is second
    assert phase_options([], 4) == []
    with pytest.raises(PlanError, match="max_degree is 0"):
        phase_options([costs], 0)


def test_backward_doubles_the_experts_and_no_work_takes_no_time():
    profile = Profile(
        LinearCost(1, 2), LinearCost(3, 4), LinearCost(5, 6), LinearCost(0, 0), LinearCost(7, 8)
    )
    work = LayerWork(10, 0, 20, 30)
    assert stage_costs(profile, work) == StageCosts((1, 0, 7, 5, 1), (20, 0, 240, 120, 20))
    assert stage_costs(profile, work, backward=True) == StageCosts(
        (1, 0, 14, 5, 1), (20, 0, 480, 120, 20)
    )
    assert stage_costs(profile, work).sequential_ms == 1 + 7 + 5 + 1 + 20 + 240 + 120 + 20


@given(COSTS, st.sampled_from([0.0, 3.5, 50.0]), st.booleans())
def test_lanes_are_what_was_planned(costs, slice_ms, uneven):
    plan = phase_options([costs], 6, uneven=uneven)[0].choose(slice_ms)
    lanes = planned_lanes(costs, plan)
    assert tuple(lanes) == STREAMS
    operations = [own for lane in lanes.values() for own in lane]
    counted = {(own.stage, own.chunk) for own in operations}
    expected = {(stage, chunk) for stage in STAGES for chunk in range(plan.degree)}
    assert counted == expected | ({("gradient", 0)} if slice_ms else set())
    assert len(operations) == len(counted)
    assert max(own.end_ms for own in operations) == pytest.approx(plan.predicted_ms)
    for stream, lane in lanes.items():
        assert {STREAM_OF[own.stage] for own in lane} == {stream}
        ends = [own.end_ms for own in lane]
        assert ends == sorted(ends)
    # Who follows the lists one operation at a time takes exactly as long, and never waits forever.
    played = oracles.makespan_of_order(
        durations(costs, plan.fractions),
        [(STAGES.index(own.stage), own.chunk) for own in lanes["intra"]],
        slice_ms,
    )
    assert played == pytest.approx(plan.predicted_ms, rel=1e-9)


def test_lanes_with_stages_that_take_no_time():
    costs = StageCosts((0.0,) * 5, (6.0, 0.0, 0.0, 0.0, 6.0))
    plan = phase_options([costs], 3)[0].choose()
    intra = planned_lanes(costs, plan)["intra"]
    gathered = [own.chunk for own in intra if own.stage == "allgather"]
    assert gathered == list(range(plan.degree))
    assert np.all([own.start_ms <= own.end_ms for own in intra])
