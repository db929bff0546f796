"""Traces: made, drawn, read in four formats, cut and capped."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.errors import TraceError
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.trace import Change, NodeEvent, Trace
from megatron_resilient.simulation.trace_files import read_trace, write_trace

PUBLIC = Path(__file__).resolve().parents[2].parent / "shared" / "data"

drawn = st.builds(
    draw_failures,
    nodes=st.integers(1, 12),
    mtbf_seconds=st.sampled_from([30.0, 500.0]),
    seconds=st.just(3000.0),
    seed=st.integers(0, 10_000),
    repair_seconds=st.sampled_from([None, 0.0, 100.0]),
    nodes_per_failure=st.sampled_from([1.0, 2.5]),
)


def written(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_our_csv(tmp_path):
    path = written(
        tmp_path,
        "seconds, event, node\n0,add,a\n0,add,b\n\n"
        "30.5,remove,a\n30.5,add,c\n60,leave,b\n90,add,a\n",
    )
    trace = read_trace(path)
    assert trace.start == ("a", "b")
    assert trace.changes == (
        Change(30.5, lost=("a",), joined=("c",)),
        Change(60, left=("b",)),
        Change(90, joined=("a",)),
    )
    assert trace.seconds == 90
    assert trace.sizes() == [(0.0, 2), (30.5, 2), (60, 1), (90, 2)]
    assert trace.node_seconds == 2 * 60 + 30
    assert trace.mean_seconds_between_losses == 90


def test_files_of_windows(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbfseconds,event,node\r\n0,add,a\r\n0,add,b\r\n9,remove,b\r\n")
    assert read_trace(path).changes == (Change(9, lost=("b",)),)
    path.write_text("seconds,event,node\n", encoding="utf-16")
    with pytest.raises(TraceError, match=r"trace\.csv: no text in UTF-8"):
        read_trace(path)


def test_milliseconds_of_bamboo_and_oobleck(tmp_path):
    trace = read_trace(written(tmp_path, "0,add,node1\n0,add,node2\n300000,remove,node2\n"))
    assert trace.start == ("node1", "node2")
    assert trace.changes == (Change(300.0, lost=("node2",)),)


def test_intervals_of_parcae(tmp_path):
    rows = [
        '[0, "add", {"nodes": ["a", "b"], "duration": 60000, "other": 1}]',
        '[60000, "no-op", {"nodes": [], "duration": 60000}]',
        '[120000, "remove", {"nodes": ["a"], "duration": 60000}]',
    ]
    trace = read_trace(written(tmp_path, "\n".join(rows)))
    assert trace.changes == (Change(120.0, lost=("a",)),)
    assert trace.seconds == 180


def test_counts_go_back_where_a_later_row_knows_better(tmp_path):
    counts = [(0, 3), (1, 3), (2, 3), (1, 1), (2, 1), (3, 2), (4, 2)]
    rows = [f"12:{minute:02}:00, {number}" for minute, number in counts]
    path = written(tmp_path, "\n".join(f"2021-12-11, {row}" for row in rows))
    trace = read_trace(path, seed=1)
    assert trace.sizes() == [(0.0, 3), (60.0, 1), (180.0, 2)]
    assert len(trace.changes[0].lost) == 2
    assert trace == read_trace(path, seed=1)
    drawn_nodes = {read_trace(path, seed=seed).changes[0].lost for seed in range(20)}
    assert len(drawn_nodes) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no events"),
        ("hello\n", "begin with a line"),
        ("seconds,event,node\n1,join,a\n", "line 2 is '1,join,a'"),
        ("seconds,event,node\n1,add\n", "line 2"),
        ("seconds,event,node\n-1,add,a\n", "line 2"),
        ("seconds,event,node\nnan,add,a\n", "line 2"),
        ("seconds,event,node\n0,add,a\n5,add,a\n", "at 5 s node 'a' comes, and is there"),
        ("seconds,event,node\n0,add,a\n5,remove,b\n", "at 5 s node 'b' goes, and is not"),
        ("seconds,event,node\n5,add,a\n4,add,b\n", "an event at 4 s after one at 5 s"),
        ('[0, "add", {"nodes": ["a"]}]', "line 1"),
        ('[0, "fly", {"nodes": ["a"], "duration": 1}]', "line 1"),
        ('[0, "add", {"nodes": "ab", "duration": 1}]', "line 1"),
        ('[0, "add", {"nodes": ["a"], "duration": NaN}]', "line 1"),
        ("[" * 100_000, "line 1"),
        ("seconds,event,node\n0,add,a\ninf,remove,a\n", "line 3"),
        ("2021-12-11, 12:00:00, 999999999", "line 1 has more than 1,000,000 nodes"),
        ("2021-12-11, 12:00:00, 3\n2021-12-11, 25:00:00, 3", "line 2"),
        ("2021-12-11, 12:00:00, 3\nend", "line 2"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@given(drawn)
def test_what_is_written_is_read(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    write_trace(trace, path)
    read = read_trace(path)
    assert read.start == trace.start
    assert read.changes == trace.changes


@given(drawn)
def test_drawn_traces_are_possible_ones(trace):
    """Played event by event, each node comes before it goes, and time runs forwards."""
    again = Trace.of(trace.events(), trace.seconds, trace.source)
    assert again == trace
    times = [change.seconds for change in trace.changes]
    assert times == sorted(set(times))
    assert all(0 < at < trace.seconds for at in times)
    assert min(number for _, number in trace.sizes()) >= 0


def test_the_same_seed_draws_the_same():
    first, same, other = (draw_failures(8, 100.0, 1e4, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first.changes != other.changes


def test_failures_come_as_often_as_asked_for():
    trace = draw_failures(20, 100.0, 4e5, seed=5, repair_seconds=0.0, nodes_per_failure=2.0)
    assert trace.mean_seconds_between_losses == pytest.approx(100, rel=0.05)
    lost = [len(change.lost) for change in trace.changes]
    assert sum(lost) / len(lost) == pytest.approx(2, rel=0.05)
    assert {number for _, number in trace.sizes()} == {20}


def test_nodes_that_are_not_replaced_die_out_ever_slower():
    trace = draw_failures(4, 100.0, 1e6, seed=1)
    assert trace.sizes()[-1][1] == 0
    assert len(trace.changes) == 4
    assert not draw_failures(4, math.inf, 1e6).changes


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"mtbf_seconds": 0.0},
        {"seconds": math.inf},
        {"nodes_per_failure": 0.5},
        {"repair_seconds": -1.0},
    ],
)
def test_failures_that_cannot_be_drawn(wrong):
    with pytest.raises(TraceError, match="cannot be"):
        draw_failures(**{"nodes": 2, "mtbf_seconds": 1.0, "seconds": 9.0} | wrong)


@settings(max_examples=50)
@given(drawn, st.integers(1, 8))
def test_a_cap_uses_as_many_as_there_are_up_to_it(trace, nodes):
    capped = trace.capped(nodes)
    whole, cut = dict(trace.sizes()), dict(capped.sizes())
    number = 0
    for at in sorted(whole):
        number = cut.get(at, number)
        assert number == min(nodes, whole[at])


@settings(max_examples=50)
@given(drawn, st.floats(0, 2900), st.floats(1, 5000))
def test_a_window_has_the_sizes_of_the_whole(trace, begin, seconds):
    part = trace.window(begin, seconds)
    assert part.seconds == seconds

    def size(of, at):
        return [number for time, number in of.sizes() if time <= at][-1]

    for at in (0.0, *(change.seconds for change in part.changes)):
        assert size(part, at) == size(trace, begin + at + 1e-9)


def test_windows_that_cannot_be():
    with pytest.raises(TraceError, match="no part"):
        draw_failures(2, 1.0, 9.0).window(-1.0, 5.0)
    with pytest.raises(TraceError, match="no part"):
        draw_failures(2, 1.0, 9.0).window(0.0, 0.0)


def test_a_node_that_comes_and_goes_at_once_was_never_there():
    events = [NodeEvent(0, "add", "a"), NodeEvent(5, "add", "b"), NodeEvent(5, "remove", "b")]
    assert Trace.of(events, 9, "x").changes == (Change(5),)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not part of the project")
@pytest.mark.parametrize(
    ("name", "nodes", "failures"),
    [
        ("bamboo/p3-trace.csv", 32, 79),
        ("oobleck/5m.csv", 30, 15),
        ("parcae/trace_hh_55_65.txt", 32, 9),
        ("bamboo/a100x1-east1b.txt", 64, 36),
    ],
)
def test_public_traces(name, nodes, failures):
    trace = read_trace(PUBLIC / name)
    assert trace.most_nodes == nodes
    assert sum(1 for change in trace.changes if change.lost) == failures
