"""Plans of slices: what is final, once, in order, within bounds; and the rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.gradient_slices import (
    ALIGNMENT,
    Range,
    Stretch,
    bytes_made,
    plan_slices,
    remaining,
    rows_by_owner,
)
from megatron_resilient.errors import PlanError


@st.composite
def problems(draw):
    """Buffers cut into stretches of random layers (0: never sent), and windows."""
    stretches, lengths = [], []
    for buffer in range(draw(st.integers(1, 3))):
        at, size = 0, draw(st.sampled_from([2, 4]))
        for length in draw(st.lists(st.integers(1, 400), min_size=1, max_size=6)):
            layer = draw(st.integers(0, 5))
            if layer:
                stretches.append(Stretch(Range(buffer, at, at + length), size, layer))
            at += length
        lengths.append(at)
    layers = sorted(draw(st.lists(st.integers(1, 5), max_size=6)), reverse=True)
    return stretches, lengths, [(layer, draw(st.integers(0, 3000))) for layer in layers]


def numbers(ranges):
    return [(r.buffer, i) for r in ranges for i in range(r.start, r.stop)]


@given(problems())
def test_every_element_is_reduced_once_and_only_when_final(problem):
    stretches, lengths, windows = problem
    layer_of = {n: s for s in stretches for n in numbers([s.elements])}
    plan = plan_slices(stretches, windows)
    assert len(plan) == len(windows)
    sent = []
    for (layer, room), ranges in zip(windows, plan, strict=True):
        own = numbers(ranges)
        assert all(layer_of[n].layer > layer for n in own)
        assert sum(layer_of[n].element_bytes for n in own) <= room
        sent += own
    for buffer, length in enumerate(lengths):
        ranges = [(r.start, r.stop) for own in plan for r in own if r.buffer == buffer]
        sent += numbers(Range(buffer, a, b) for a, b in remaining(length, ranges))
    assert sorted(sent) == [(b, i) for b, length in enumerate(lengths) for i in range(length)]


@given(problems())
def test_windows_are_filled_but_for_the_alignment(problem):
    stretches, _, windows = problem
    layer_of = {n: s for s in stretches for n in numbers([s.elements])}
    sent = set()
    for (layer, room), ranges in zip(windows, plan_slices(stretches, windows), strict=True):
        own = numbers(ranges)
        sent.update(own)
        left = room - sum(layer_of[n].element_bytes for n in own)
        waiting = {n for n, s in layer_of.items() if s.layer > layer} - sent
        assert not waiting or left < ALIGNMENT * 4
        for each in ranges:  # a cut inside a stretch is aligned
            inside = (each.buffer, each.stop)
            whole = layer_of.get(inside)
            if whole is not None and whole.elements.start != each.stop:
                assert each.stop % ALIGNMENT == 0


def test_neighbours_travel_together():
    stretches = [
        Stretch(Range(0, 0, 100), 4, 9),
        Stretch(Range(0, 100, 300), 4, 3),
        Stretch(Range(0, 300, 900), 4, 2),
    ]
    assert plan_slices(stretches, [(3, 80), (2, 10_000), (1, 1200)]) == [
        [],  # twenty elements: less than what an aligned cut needs
        [Range(0, 0, 300)],
        [Range(0, 300, 576)],
    ]


def test_refusals():
    with pytest.raises(PlanError, match="layer 2 is -1 bytes: must be >= 0"):
        plan_slices([], [(2, -1)])
    with pytest.raises(PlanError, match="window of layer 2 after that of layer 1"):
        plan_slices([], [(1, 0), (2, 0)])


@given(st.integers(1, 5), st.integers(1, 20), st.data())
def test_owners_keep_what_is_in_their_shards(owners, shard, data):
    start = data.draw(st.integers(0, owners * shard))
    stop = data.draw(st.integers(start, owners * shard))
    expected = [0] * owners
    for element in range(start, stop):
        expected[element // shard] += 1
    assert rows_by_owner(start, stop, shard, owners) == expected


@given(problems(), st.sets(st.integers(1, 5), min_size=1))
def test_windows_can_hold_all_that_becomes_final_above_them(problem, layers):
    """What a layer makes final is what the window below can send and its own cannot."""
    stretches, _, _ = problem
    made = bytes_made(stretches, layers)
    assert sum(made.values()) == sum(
        (each.elements.stop - each.elements.start) * each.element_bytes for each in stretches
    )
    for layer in layers:
        (sent,) = plan_slices(stretches, [(layer, 10**9)])
        size = {each.elements.buffer: each.element_bytes for each in stretches}
        sendable = sum((r.stop - r.start) * size[r.buffer] for r in sent)
        # A layer without a window that stands above the highest one is sent there as well.
        above = sum(bytes_ for number, bytes_ in made.items() if number > layer)
        own = sendable - above
        assert 0 <= own <= (made[layer] if layer == max(layers) else 0)


def test_layers_without_a_window_count_with_the_one_above():
    stretches = [Stretch(Range(0, 10 * n, 10 * n + 10), 4, n) for n in (1, 2, 3, 4, 9)]
    # 3 and 4 become final between the windows of 4 and 2; 9 before that of 4, 1 after that of 2.
    assert bytes_made(stretches, [2, 4]) == {2: 80, 4: 120}
