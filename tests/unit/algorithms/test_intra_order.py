"""The order of the intra-node stream, by name and as a list."""

import pytest

from megatron_resilient.algorithms.intra_order import intra_order
from megatron_resilient.algorithms.stream_model import ORDERS
from megatron_resilient.errors import PlanError

A, R = "allgather", "reducescatter"


def test_by_name():
    thirds = (1 / 3, 1 / 3, 1 / 3)
    gathers, scatters = [(A, 0), (A, 1), (A, 2)], [(R, 0), (R, 1), (R, 2)]
    assert list(intra_order("gather-first", thirds)) == gathers + scatters
    scatter_first = list(intra_order("scatter-first", thirds))
    assert sorted(scatter_first) == sorted(gathers + scatters)
    assert scatter_first.index((R, 0)) < 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("degree", [1, 2, 5])
def test_names_are_complete_and_kinds_in_order(order, degree):
    steps = intra_order(order, [1 / degree] * degree)
    for kind in (A, R):
        assert [chunk for name, chunk in steps if name == kind] == list(range(degree))


def test_a_list_is_kept():
    steps = ((A, 0), (R, 0), (A, 1), (R, 1))
    assert intra_order(steps, (0.5, 0.5)) == steps


@pytest.mark.parametrize("order", ["by-size", ((A, 0),), ((A, 0), (R, 0), (R, 0)), ()])
def test_what_is_no_order_is_refused(order):
    with pytest.raises(PlanError, match="intra-node stream"):
        intra_order(order, (1.0,))
