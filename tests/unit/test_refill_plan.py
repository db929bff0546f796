"""Copies that bring a new world's state together: everything wanted, from who has it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.refill_plan import Copy, Piece, orphans, plan_refill

KEYS = ("a", "b", "c")
LENGTH = 12


@st.composite
def pieces(draw):
    key = draw(st.sampled_from(KEYS))
    start = draw(st.integers(0, LENGTH - 1))
    return Piece(key, start, draw(st.integers(start + 1, LENGTH)))


def per_rank(ranks):
    return st.lists(st.lists(pieces(), max_size=4), min_size=ranks, max_size=ranks)


@st.composite
def worlds(draw):
    ranks = draw(st.integers(1, 5))
    nodes = draw(st.lists(st.sampled_from("xyz"), min_size=ranks, max_size=ranks))
    return draw(per_rank(ranks)), draw(per_rank(ranks)), nodes


def elements(piece):
    return [(piece.key, i) for i in range(piece.start, piece.stop)]


@given(worlds())
def test_every_wanted_element_comes_once_from_a_holder_or_is_missing(world):
    held, wanted, nodes = world
    plan = plan_refill(held, wanted, nodes)
    has = [{e for piece in own for e in elements(piece)} for own in held]
    for rank, own in enumerate(wanted):
        needed = Counter(e for piece in own for e in elements(piece))
        copied = Counter()
        for copy in plan.copies:
            if copy.target == rank:
                assert set(elements(copy.piece)) <= has[copy.source]
                copied.update(elements(copy.piece))
        absent = Counter(e for r, piece in plan.missing if r == rank for e in elements(piece))
        assert copied + absent == needed
        assert not any(e in own_set for e in absent for own_set in has)


@given(worlds())
def test_what_is_at_hand_is_not_sent(world):
    held, wanted, nodes = world
    has = [{e for piece in own for e in elements(piece)} for own in held]
    for copy in plan_refill(held, wanted, nodes).copies:
        if copy.source != copy.target and set(elements(copy.piece)) & has[copy.target]:
            # Only where no single piece of its own covers the stretch.
            assert not any(
                piece.key == copy.piece.key
                and piece.start <= copy.piece.start
                and copy.piece.stop <= piece.stop
                for piece in held[copy.target]
            )
        if nodes[copy.source] != nodes[copy.target]:
            covering = {
                rank
                for rank, own in enumerate(held)
                for piece in own
                if piece.key == copy.piece.key
                and piece.start <= copy.piece.start
                and copy.piece.stop <= piece.stop
            }
            assert nodes[copy.target] not in {nodes[rank] for rank in covering}


def test_holders_share_the_sending():
    whole = [Piece(str(i), 0, 10) for i in range(6)]
    plan = plan_refill([whole, whole, whole, []], [[], [], [], whole], ["a", "b", "c", "d"])
    assert Counter(copy.source for copy in plan.copies) == {0: 2, 1: 2, 2: 2}


def test_shards_of_another_world_are_cut_and_joined():
    held = [[Piece("w", 0, 5)], [Piece("w", 5, 10)]]
    wanted = [[Piece("w", 0, 10)], []]
    assert plan_refill(held, wanted, ["a", "b"]).copies == (
        Copy(Piece("w", 0, 5), 0, 0),
        Copy(Piece("w", 5, 10), 1, 0),
    )


@given(st.integers(2, 5).flatmap(lambda n: st.tuples(per_rank(n), st.integers(0, n - 2))))
def test_orphans_are_what_only_the_leaving_hold(case):
    held, last_leaver = case
    leaving = {rank: rank <= last_leaver for rank in range(len(held))}
    taken = orphans(held, leaving)
    assert not any(taken[rank] for rank in range(len(held)) if leaving[rank])
    staying, gone = set(), set()
    for rank, own in enumerate(held):
        (gone if leaving[rank] else staying).update(e for piece in own for e in elements(piece))
    assert {e for own in taken for piece in own for e in elements(piece)} == gone - staying
