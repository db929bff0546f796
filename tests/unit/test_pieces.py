"""Pieces of state between ranks: stretches are cut and joined, whatever lies where."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.refill_plan import Copy, Piece
from megatron_resilient.comm import pieces

LENGTH = 10


def stretches(cuts, fill):
    """Cuts an array with two kinds of unlike dtype at `cuts`."""
    edges = [0, *sorted(set(cuts)), LENGTH]
    whole = {"main": torch.arange(LENGTH).float(), "moment": torch.arange(LENGTH).double() * 2}
    return [
        (start, {k: v[start:stop].clone() if fill else v[start:stop] * 0 for k, v in whole.items()})
        for start, stop in itertools.pairwise(edges)
    ]


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(pieces.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(pieces.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(pieces.dist, "get_backend", lambda group: "gloo")


def loop_back(receive, send, receive_sizes, send_sizes, group):
    receive.copy_(send)


CUTS = st.lists(st.integers(1, LENGTH - 1), max_size=3)


@given(CUTS, CUTS, st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
def test_bytes_are_in_one_order_however_an_array_is_cut(held, wanted, start, size):
    piece = Piece("w", start, min(LENGTH, start + size))
    source, target = {"w": stretches(held, True)}, {"w": stretches(wanted, False)}
    raw = torch.cat([pieces._bytes(view) for view in pieces._views(source, piece)])
    pieces._write(pieces._views(target, piece), raw)
    got = torch.cat([kinds["main"] for _, kinds in target["w"]])
    twice = torch.cat([kinds["moment"] for _, kinds in target["w"]])
    inside = torch.zeros(LENGTH)
    inside[piece.start : piece.stop] = torch.arange(piece.start, piece.stop).float()
    assert torch.equal(got, inside)
    assert torch.equal(twice, inside.double() * 2)


def test_a_copy_from_itself_needs_no_peer(alone):
    source, target = {"w": stretches([4], True)}, {"w": stretches([7], False)}
    sent = pieces.exchange([Copy(Piece("w", 2, 9), 0, 0)], source, target)
    assert sent == 0
    assert torch.cat([kinds["main"] for _, kinds in target["w"]]).tolist() == [
        0,
        0,
        *range(2, 9),
        0,
    ]


def test_rounds_keep_to_their_limit(monkeypatch):
    monkeypatch.setattr(pieces, "ROUND_BYTES", 16 * 10)
    plan = [Copy(Piece(str(i), 0, 4), i % 2, 2) for i in range(5)]
    turns = list(pieces._rounds(plan, 3))
    assert [len(turn) for turn in turns] == [2, 2, 1]
    assert [copy for turn in turns for copy in turn] == plan


def test_what_is_not_held_is_named(alone):
    with pytest.raises(KeyError, match="element 5 of Piece"):
        pieces._views({"w": [(0, {"main": torch.zeros(5)})]}, Piece("w", 3, 8))
