"""Seats: every rule against any mixture of survivors, joiners and coordinates."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.elastic.seats import Candidate, assign_seats, node_order
from megatron_resilient.elastic.world import Seat


def candidate(node, local_rank=0, coordinate=None, step=0, survivor=None):
    state = {"step": step, "coordinate": coordinate}
    survivor = coordinate is not None if survivor is None else survivor
    return Candidate(Seat(node, local_rank, state), survivor)


def fresh(nodes, per_node):
    return [candidate(f"n{i}", j) for i in range(nodes) for j in range(per_node)]


def coordinates(seats, grid):
    """(pipeline stage, tensor index) of every rank, from Megatron's order of ranks."""
    tp, _, pp = grid
    per_stage = len(seats) // pp
    return [(rank // per_stage, rank % tp) for rank in range(len(seats))]


def seated(seats, grid, step=1):
    """The survivors that a generation leaves behind."""
    return [
        candidate(seat.node, seat.local_rank, list(place), step)
        for seat, place in zip(seats, coordinates(seats, grid), strict=True)
    ]


def names(seats):
    return [(seat.node, seat.local_rank) for seat in seats]


@st.composite
def crowds(draw):
    grid = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)]))
    tp, _, pp = grid
    nodes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=7, unique=True))
    crowd = []
    for node in nodes:
        for local_rank in range(draw(st.integers(1, 4))):
            held = draw(
                st.none() | st.tuples(st.integers(0, pp - 1), st.integers(0, tp - 1)).map(list)
            )
            survivor = held is not None or draw(st.booleans())
            crowd.append(candidate(f"n{node}", local_rank, held, draw(st.integers(4, 5)), survivor))
    return draw(st.permutations(crowd)), grid


@settings(max_examples=200, deadline=None)
@given(crowds())
def test_the_rules_hold_for_any_crowd(crowd_and_grid):
    crowd, grid = crowd_and_grid
    tp, cp, pp = grid
    seats, spares = assign_seats(crowd, grid)
    of = {(c.seat.node, c.seat.local_rank): c for c in crowd}
    # Nobody is lost, nobody sits twice, and as many sit as fill whole blocks.
    assert sorted(names(seats) + names(spares)) == sorted(of)
    assert len(seats) == len(crowd) // (tp * cp * pp) * tp * cp * pp
    assert (seats, spares) == assign_seats(sorted(crowd, key=lambda c: str(c.seat)), grid)
    places = coordinates(seats, grid)
    size = len(seats) // (tp * pp)
    holders = Counter(
        tuple(c.seat.state["coordinate"]) for c in crowd if c.seat.state["coordinate"]
    )
    kept = Counter(
        place
        for seat, place in zip(seats, places, strict=True)
        if seat.state["coordinate"] == list(place)
    )
    # A coordinate is kept by all that hold it and have a place there.
    assert kept == {place: min(n, size) for place, n in holders.items() if min(n, size)}
    # No joiner sits while a survivor stands.
    if any(of[name].survivor for name in names(spares)):
        assert all(of[name].survivor for name in names(seats))
    survivors = [c for c in crowd if c.survivor]
    if seats and survivors:
        newest = max(c.seat.state["step"] for c in survivors)
        leaders = [c for c in survivors if c.seat.state["step"] == newest]
        first = of[names(seats)[0]]
        if first not in leaders and holders[0, 0] < size:
            # Each of them holds a coordinate other than rank 0's, and is needed there.
            for leader in leaders:
                place = tuple(leader.seat.state["coordinate"] or ())
                assert place
                at = names(seats).index((leader.seat.node, leader.seat.local_rank))
                assert places[at] == place != (0, 0)


def test_a_start_is_numbered_as_torchrun_does():
    for grid in ((1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2)):
        seats, spares = assign_seats(reversed(fresh(4, 2)), grid)
        assert names(seats) == [(f"n{i}", j) for i in range(4) for j in range(2)]
        assert not spares


def test_too_few_for_a_block_are_all_spares():
    seats, spares = assign_seats(fresh(3, 1), (2, 1, 2))
    assert seats == ()
    assert len(spares) == 3


@pytest.mark.parametrize("lost", range(4))
def test_whoever_is_lost_tensor_parallel_groups_stay_inside_their_nodes(lost):
    grid = (2, 1, 1)
    seats, _ = assign_seats(fresh(4, 2), grid)
    left = [c for c in seated(seats, grid) if c.seat.node != f"n{lost}"]
    again, spares = assign_seats(left, grid)
    assert not spares
    assert all(again[r].node == again[r + 1].node for r in range(0, len(again), 2))
    assert names(again) == names([c.seat for c in left])


def test_a_lost_stage_is_filled_from_the_other_and_the_odd_one_stands_by():
    grid = (1, 1, 2)
    seats, _ = assign_seats(fresh(6, 1), grid)  # n0 n1 n2 in stage 0, n3 n4 n5 in stage 1
    left = [c for c in seated(seats, grid) if c.seat.node not in ("n0", "n1", "n2")]
    again, spares = assign_seats(left, grid)
    assert len(again) == 2
    assert {seat.node for seat in again + spares} == {"n3", "n4", "n5"}
    left = [c for c in seated(seats, grid) if c.seat.node != "n0"]
    again, spares = assign_seats(left, grid)
    assert names(again) == [("n1", 0), ("n2", 0), ("n3", 0), ("n4", 0)]
    assert names(spares) == [("n5", 0)]


def test_the_newest_step_is_not_left_standing():
    crowd = [candidate("n0", 0, [0, 0], 7), candidate("n1", 0, [0, 0], 8)]
    crowd.append(candidate("n2", 0, [1, 0], 7))
    seats, spares = assign_seats(crowd, (1, 1, 2))
    assert names(seats) == [("n1", 0), ("n2", 0)]
    assert names(spares) == [("n0", 0)]


def test_nodes_are_sorted_by_their_numbers():
    assert sorted(["n10", "n9", "a", "n1b", "n1"], key=node_order) == [
        "a",
        "n1",
        "n1b",
        "n9",
        "n10",
    ]
