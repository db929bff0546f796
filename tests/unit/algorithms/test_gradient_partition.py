import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.algorithms.gradient_partition import (
    Window,
    fill_free_room,
    partition_gradients,
)
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.errors import PlanError
from tests.support import overlap_oracles as oracles


@st.composite
def windows(draw):
    ways = draw(st.integers(1, 3))
    floors = [draw(st.integers(0, 12)) for _ in range(ways)]
    return Window(
        tuple(map(float, floors)), tuple(float(draw(st.integers(0, floor))) for floor in floors)
    )


@st.composite
def problems(draw):
    row = draw(st.lists(windows(), min_size=1, max_size=4))
    made = [draw(st.integers(0, 4)) for _ in row]
    return row, made, LinearCost(draw(st.sampled_from([0.0, 0.5, 2.0])), 1.0)


def check_possible(row, made, found):
    """Nothing is sent before it is there, and everything is sent."""
    assert len(found.slices_bytes) == len(row) + 1
    there = 0
    for sent, more in zip(found.slices_bytes, [*made, 0], strict=True):
        assert 0 <= sent <= there
        there += more - sent
    assert there == 0


@given(problems())
@example(([Window((8.0, 10.0), (6.0, 2.0)), Window((1.0,), (0.0,))], [4, 4], LinearCost(0.5, 1.0)))
def test_no_distribution_of_whole_bytes_is_better(problem):
    row, made, allreduce = problem
    found = partition_gradients(row, made, allreduce)
    check_possible(row, made, found)
    best = oracles.least_exposed_ms(
        [(own.floor_ms, own.base_ms) for own in row], made, allreduce.alpha_ms, allreduce.beta
    )
    # With at most 16 bytes a unit is one byte.
    assert sum(found.exposed_ms) == pytest.approx(best, abs=1e-9)


@given(problems(), st.integers(2, 5))
def test_coarse_units_lose_less_than_one_a_window(problem, units):
    row, made, allreduce = problem
    found = partition_gradients(row, made, allreduce, units)
    check_possible(row, made, found)
    best = sum(partition_gradients(row, made, allreduce).exposed_ms)
    slices, _ = fill_free_room(row, made, allreduce)
    unit = -(-(sum(made) - sum(slices)) // units)
    assert best - 1e-9 <= sum(found.exposed_ms)
    assert sum(found.exposed_ms) <= best + allreduce.beta * unit * len(row) + 1e-9


def test_free_room_is_filled_as_early_as_possible():
    row = [Window.of_dense(5.0)] * 4
    found = partition_gradients(row, [10, 0, 0, 3], LinearCost(1.0, 1.0))
    # The first window is over before anything is there; alpha is paid by every slice.
    assert found.slices_bytes == (0, 4, 4, 2, 3)
    assert found.exposed_ms == (0, 0, 0, 0, 4)
    assert found.slices_ms == (0, 5, 5, 3, 4)


def test_no_slice_where_not_even_alpha_fits():
    row = [Window.of_dense(0.9)] * 2
    assert fill_free_room(row, [5, 0], LinearCost(1.0, 1.0)) == ([0, 0], [0, 5])
    # All of it in the window still hides more than nothing would.
    assert partition_gradients(row, [5, 0], LinearCost(1.0, 1.0)).exposed_ms == (0, 5.1, 0)


def test_another_way_to_run_a_layer_makes_room():
    """Two milliseconds more for the layer hide eight of the gradient."""
    layer = Window((10.0, 12.0), (10.0, 3.0))
    found = partition_gradients([Window.of_dense(0.0), layer], [9, 0], LinearCost(0.0, 1.0))
    assert found.slices_bytes == (0, 9, 0)
    assert found.exposed_ms == (0, 2, 0)


@given(st.floats(0, 60), st.sampled_from([4, 8]))
def test_the_window_of_a_layer_takes_what_its_options_take(slice_ms, max_degree):
    costs = StageCosts((0.3, 0.2, 0.1, 0.2, 0.3), (6.0, 9.0, 20.0, 9.0, 6.0))
    options = phase_options([costs], max_degree, uneven=True)[0]
    window = Window.of_moe(options)
    assert window.exposed_ms(slice_ms)[0] + options.best_ms == pytest.approx(
        options.choose(slice_ms).predicted_ms
    )
    if slice_ms <= window.room_ms:
        assert window.exposed_ms(slice_ms)[0] == 0


def test_gradients_that_cannot_be():
    with pytest.raises(PlanError, match="gradients of window 1 are -1 bytes"):
        partition_gradients([Window.of_dense(1.0)] * 2, [0, -1], LinearCost(0.0, 1.0))
    assert partition_gradients([], [], LinearCost(0.0, 1.0)).slices_bytes == (0,)


def test_no_crumb_is_sent_after_all_if_there_is_a_slice_already():
    """1000 bytes are no multiple of 96 units, and a crumb would pay alpha once more."""
    row = [Window.of_dense(0.0), Window.of_dense(0.5)]
    found = partition_gradients(row, [1000, 0], LinearCost(1.0, 1.0))
    assert found.slices_bytes == (0, 1000, 0)
    assert found.exposed_ms == (0, 1000.5, 0)
