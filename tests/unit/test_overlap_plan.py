"""Plans of passes, and the static schedules that they become."""

import itertools

import pytest

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.layer_schedule import schedule_layers
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.comm.node_groups import join_node_map, read_node_map
from megatron_resilient.errors import PlanError
from megatron_resilient.mcore.overlap.plan import LayerOverlap, PassPlan


def test_a_plan_is_a_schedule():
    plan = PassPlan(2, (0.25, 0.75), "scatter-first")
    schedule = plan.schedule(True, True)
    assert schedule.lanes["inter"] == [
        ("dispatch", 0),
        ("dispatch", 1),
        ("gradient", 0),
        ("combine", 0),
        ("combine", 1),
    ]
    assert sorted(schedule.lanes["intra"])[:2] == [("allgather", 0), ("allgather", 1)]
    assert schedule.needs["combine", 1] == (("reducescatter", 1),)
    assert schedule.needs["expert", 0] == (("allgather", 0),)
    assert plan.schedule(True, True) is schedule
    assert PassPlan(2, (0.25, 0.75), "scatter-first").schedule(True, True) is schedule


def test_without_expert_tensor_parallelism_there_is_no_intra_stream():
    schedule = PassPlan(3).schedule(False, False)
    assert set(schedule.lanes) == {"inter", "compute"}
    assert schedule.needs["expert", 2] == (("dispatch", 2),)
    assert schedule.needs["combine", 2] == (("expert", 2),)
    assert ("gradient", 0) not in schedule.uses


def test_nothing_is_cut_unless_told():
    overlap = LayerOverlap()
    assert overlap.forward.degree == overlap.backward.degree == 1
    assert overlap.gradient_window is overlap.on_outcome is None


@pytest.mark.parametrize("uneven", [False, True])
def test_what_is_planned_can_be_carried_out(uneven):
    line = LinearCost(0.1, 1e-6)
    profile = Profile(line, line, line, line, line)
    work = LayerWork(4e6, 3e6, 2e6, 5e6, gradient_bytes=10**6)
    layer = schedule_layers(profile, [work, work], 8, uneven=uneven)[0]
    for backward, plan in ((False, layer.forward), (True, layer.backward)):
        lanes = layer.lanes(backward=backward)
        found = PassPlan.planned(plan, lanes)
        assert found.degree == plan.degree > 1
        assert [float(cut) for cut in found.cuts[1:]] == pytest.approx(
            list(itertools.accumulate(plan.fractions)), abs=1e-4
        )
        has_window = any(own.stage == "gradient" for own in lanes["inter"])
        schedule = found.schedule(True, has_window)
        for lane, operations in lanes.items():
            assert list(schedule.lanes[lane]) == [(own.stage, own.chunk) for own in operations]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "at least 1"),
        ((2, (1.0,)), "1 shares for 2 chunks"),
        ((2, (0.5, 0.6)), "their sum 1"),
        ((2, None, "by-size"), "order 'by-size'"),
        ((1, None, (("allgather", 0),)), "of every chunk"),
        ((1, None, (("reducescatter", 0), ("allgather", 0))), "waits in a circle"),
    ],
)
def test_what_is_no_plan_is_refused_where_it_is_made(arguments, message):
    with pytest.raises(PlanError, match=message):
        PassPlan(*arguments)


def test_a_node_map_says_who_is_together_whatever_nodes_are_called():
    told = join_node_map(["node,7", "b", "node,7", "c"])
    assert read_node_map(4, {"MEGATRON_RESILIENT_NODE_MAP": told}) == ["0", "1", "0", "2"]
