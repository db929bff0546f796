"""What the report takes from the events, before anything is drawn."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_resilient.errors import TelemetryError
from megatron_resilient.report.clock import RunClock, Stop
from megatron_resilient.report.loads import MAX_COLUMNS, ExpertLoads
from megatron_resilient.report.members import Membership, Stay
from megatron_resilient.report.plot_load import MAX_PANELS, chosen_layers
from megatron_resilient.report.run import Mark, Run
from megatron_resilient.report.series import thin_out
from megatron_resilient.report.text import (
    clean,
    compact,
    duration,
    in_bytes,
    moment,
    percent,
    plural,
    shorten,
    significant,
)


def event(kind, time, step=None, generation=0, **fields):
    common = {"time": float(time), "event": kind, "step": step, "generation": generation, "rank": 0}
    return common | fields


def step(time, number, **fields):
    return event("step", time, number, loss={"lm loss": 1.0}, seconds=2.0, tokens=10, **fields)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.00012, "0.120 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (61.4, "1 min 1 s"),
        (3599.7, "1 h"),
        (7 * 3600 + 57 * 60 + 29, "7 h 57 min"),
        (86399, "1 d"),
        (93784, "1 d 2 h"),
        (1e8, "1,157 d 10 h"),
        (-1, "-1 s"),
        (math.nan, "nan s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1 k"),
        (1234567, "1.23 M"),
        (999_999, "1 M"),
        (-1500, "-1.5 k"),
        (2e15, "2 P"),
        (0.25, "0.25"),
        (1e-9, "1.00e-09"),
        (math.inf, "inf"),
    ],
)
def test_compact_numbers(value, text):
    assert compact(value) == text


def test_other_texts():
    assert significant(10.7337, 4) == "10.73"
    assert significant(12345.6) == "12,346"
    assert significant(5.1, pad=True) == "5.10"
    assert in_bytes(212_000_000_000) == "212 GB"
    assert in_bytes(12) == "12 B"
    assert percent(0.9481) == "94.8 %"
    assert (plural(1, "step"), plural(2000, "step")) == ("1 step", "2,000 steps")
    assert plural(2, "recovery", "recoveries") == "2 recoveries"
    assert moment(1_767_600_000) == "2026-01-05 08:00:00"
    assert moment(1e300) == "1e+300 s"
    assert clean("a\x00\ud800\nb") == "a��\nb"
    assert shorten("a\nb" * 4, 7) == "a b…b a"[:3] + "…" + "a b"


@given(st.text(), st.integers(min_value=1, max_value=30))
def test_what_is_shortened_fits_and_can_be_written(text, length):
    short = shorten(text, length)
    assert len(short) <= length
    short.encode("utf-8")
    if len(text) <= length and text.isprintable():
        assert short == text


def test_running_time_leaves_out_stops_between_jobs():
    clock = RunClock(
        [
            event("run_start", 100),
            step(103, 1),
            step(160, 2),  # a long step is no stop
            event("member_leave", 162, member="a"),
            event("member_join", 1162, member="a"),
            event("run_start", 1170),
            step(1172, 3),
            event("run_end", 1174),
            event("run_start", 5000),
            event("run_end", 5001),
        ]
    )
    assert clock.stops == [Stop(162, 1162), Stop(1174, 5000)]
    assert clock.total_seconds == 62 + 12 + 1
    times = [100, 160, 162, 600, 1162, 1170, 1174, 3000, 5000, 5001]
    assert clock(times).tolist() == [0, 60, 62, 62, 62, 70, 74, 74, 74, 75]


def test_running_time_of_one_event_and_of_writers_out_of_order():
    assert RunClock([event("failure", 7)])([7]).tolist() == [0]
    clock = RunClock([step(20, 1), event("failure", 10), event("run_start", 15), step(30, 2)])
    assert clock.stops == []
    assert clock([10, 30]).tolist() == [0, 20]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(min_value=0, max_value=1000), st.floats(-1e6, 1e6) | st.just(math.nan)
        ),
        max_size=200,
    ),
    st.integers(min_value=1, max_value=50),
)
def test_a_thinned_series_keeps_extremes_and_means(pairs, points):
    x = np.array([x for x, _ in pairs], dtype=float)
    y = np.array([y for _, y in pairs], dtype=float)
    line = thin_out(x, y, points)
    finite = np.isfinite(y)
    assert line.x.size <= max(points, 0)
    assert line.exact == (finite.sum() <= points)
    assert np.all(np.diff(line.x) >= 0)
    if finite.any():
        assert line.low.min() == y[finite].min()
        assert line.high.max() == y[finite].max()
        tolerance = 1e-6
        assert np.all(line.low - tolerance <= line.mean)
        assert np.all(line.mean <= line.high + tolerance)
    else:
        assert line.x.size == 0


def test_thinning_a_ramp():
    line = thin_out(np.arange(8.0), np.arange(8.0), 4)
    assert line.x.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert line.mean.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert line.low.tolist() == [0, 2, 4, 6]
    assert line.high.tolist() == [1, 3, 5, 7]


def load(layer, at, tokens, steps=10, **fields):
    return event("expert_load", at, at, layer=layer, tokens=tokens, steps=steps, **fields)


def test_expert_loads_of_known_events():
    loads = ExpertLoads.of(
        [
            load(2, 10, [30, 10], rank_tokens=[20, 20]),
            load(5, 10, [0, 0]),
            load(2, 20, [1, 1]),
            load(2, 20, [0, 8], rank_tokens=[6, 2]),  # written again after a roll-back
            load(5, 20, [4, 4]),
        ]
    )
    assert loads.layers == [2, 5]
    assert (loads.first_step, loads.last_step) == (0, 20)
    assert loads.relative[0].tolist() == [[1.5, 0.0], [0.5, 2.0]]
    np.testing.assert_array_equal(loads.imbalance, [[1.5, 2.0], [np.nan, 1.0]])
    np.testing.assert_array_equal(loads.rank_imbalance, [[1.0, 1.5], [np.nan, np.nan]])
    assert loads.typical_imbalance().tolist() == [1.75, 1.0]


def test_an_event_spreads_over_the_steps_that_it_covers():
    loads = ExpertLoads.of([load(1, 10, [3, 1]), load(1, 20, [2, 2]), load(1, 40, [0, 9], 20)])
    # Intervals of 40/3 steps; each event fills those that its steps touch most.
    assert loads.imbalance.shape == (1, 3)
    assert np.isfinite(loads.imbalance).all()
    assert loads.imbalance[0, 0] == pytest.approx(1.5)
    assert loads.imbalance[0, 2] == pytest.approx(2.0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(1, 3000),
            st.integers(0, 500),
            st.lists(st.integers(0, 9), min_size=4, max_size=4),
        ),
        min_size=1,
        max_size=400,
    )
)
def test_expert_loads_of_any_events(entries):
    loads = ExpertLoads.of([load(layer, at, t, steps) for layer, at, steps, t in entries])
    columns = loads.imbalance.shape[1]
    assert 1 <= columns <= MAX_COLUMNS
    for grid, imbalance in zip(loads.relative, loads.imbalance, strict=True):
        assert grid.shape == (4, columns)
        known = np.isfinite(imbalance)
        np.testing.assert_allclose(grid[:, known].mean(axis=0), 1.0)
        assert np.all(imbalance[known] >= 1 - 1e-12)
        assert np.all(imbalance[known] <= 4 + 1e-12)
    # Whoever had tokens is seen somewhere.
    latest = {(layer, at): tokens for layer, at, _, tokens in entries}
    for layer in loads.layers:
        with_tokens = np.zeros(4, dtype=bool)
        for (of_layer, _), tokens in latest.items():
            if of_layer == layer:
                with_tokens |= np.array(tokens) > 0
        grid = loads.relative[loads.layers.index(layer)]
        np.testing.assert_array_equal((np.nan_to_num(grid) > 0).any(axis=1), with_tokens)


def test_two_models_in_one_directory():
    with pytest.raises(TelemetryError, match="layer 1 has 2 experts and, at step 20, 3"):
        ExpertLoads.of([load(1, 10, [1, 2]), load(1, 20, [1, 2, 3])])


def test_without_loads_there_are_none():
    assert ExpertLoads.of([step(1, 1)]) is None


@given(st.integers(1, 100), st.data())
def test_the_layers_to_draw_have_the_worst_among_them(count, data):
    worst = data.draw(st.integers(0, count - 1))
    loads = ExpertLoads.of([load(n, 10, [4, 0] if n == worst else [2, 2]) for n in range(count)])
    chosen = chosen_layers(loads)
    assert worst in chosen
    assert len(chosen) == min(count, MAX_PANELS) == len(set(chosen))
    assert chosen == sorted(chosen)


def test_members_by_name():
    membership = Membership.of(
        [
            event("member_join", 1, member="b"),
            event("member_join", 2, member="a", members=2),
            event("failure", 5, failed_nodes=["b", "unknown"]),
            event("member_leave", 6, member="b"),
            event("member_join", 8, member="b"),
            event("member_leave", 9, member="a", planned=True),
            event("run_end", 12, exit=0),
        ]
    )
    assert membership.unit == "nodes"
    assert membership.counts == [(1, 1), (2, 2), (5, 1), (6, 1), (8, 2), (9, 1)]
    assert membership.stays == [
        Stay("b", 1, 5, "failed"),
        Stay("b", 8, 12, "stays"),
        Stay("a", 2, 9, "planned"),
    ]


def test_members_by_number():
    start = event("run_start", 1, world_size=8)
    assert Membership.of([start, step(2, 1)]) is None
    membership = Membership.of([start, event("recovery", 5, 3, seconds={}, world_size=6)])
    assert (membership.unit, membership.counts) == ("ranks", [(1, 8), (5, 6)])
    assert membership.stays == []


def test_a_run_taken_apart():
    run = Run.of(
        "r",
        [
            event("run_start", 0, world_size=2),
            step(2, 1),
            step(4, 2),
            event("failure", 5, 3),
            event("recovery", 6, 3, 1, seconds={"plan": 1.0}),
            step(8, 3, generation=1) | {"generation": 1},
            event("run_start", 100, world_size=2),
            step(102, 3),
        ],
    )
    assert run.done.step.tolist() == [1, 2, 3]
    assert [lost.step.tolist() for lost in run.lost] == [[3]]
    assert run.failures == [Mark(5, 3)]
    assert run.recoveries == [Mark(6, 3)]
    assert run.resumes == [Mark(8, 3)]
    assert run.clock.total_seconds == 10
    assert run.effective_share == pytest.approx(0.6)


@given(st.floats(min_value=0.001, max_value=1e9), st.floats(min_value=0.001, max_value=1e9))
def test_longer_is_not_written_as_shorter(a, b):
    assume(a < b)
    assert seconds_of(duration(a)) <= seconds_of(duration(b)) * (1 + 1e-9)


def seconds_of(text):
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
    words = text.replace(",", "").split()
    return sum(float(n) * units[u] for n, u in zip(words[::2], words[1::2], strict=True))
