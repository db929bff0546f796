"""What a replay decides and counts: events, worlds, kept steps, and costs from marks."""

import subprocess
import sys

import pytest

from benchmarks.replay import parse
from benchmarks.replay_accounts import Mark, Members, kept, sped_up, without_notice
from benchmarks.replay_costs import (
    Session,
    Stop,
    costs_of_ours,
    costs_of_restart,
    line_through,
    lost_seconds,
    predict,
    steady_steps,
)
from benchmarks.replay_plot import plot
from benchmarks.replay_report import Judged
from benchmarks.replay_run import Recording
from megatron_resilient.simulation.costs import Costs, write_costs
from megatron_resilient.simulation.trace import NodeEvent, Trace
from tools import forked_ranks

TEN = tuple(f"n{number}" for number in range(10))


def trace_of(*events, seconds=100.0):
    first = [NodeEvent(0.0, "add", node) for node in TEN]
    return Trace.of([*first, *(NodeEvent(*event) for event in events)], seconds, "a test")


def test_a_trace_is_sped_up_as_a_whole():
    fast = sped_up(trace_of((32.0, "remove", "n3"), (64.0, "add", "x")), 16)
    assert [change.seconds for change in fast.changes] == [2.0, 4.0]
    assert fast.seconds == 6.25
    assert (fast.start, fast.changes[0].lost) == (TEN, ("n3",))


def test_without_notice_a_departure_is_a_loss():
    deaf = without_notice(trace_of((5.0, "leave", "n1"), (5.0, "remove", "n2")))
    assert sorted(deaf.changes[0].lost) == ["n1", "n2"]
    assert deaf.changes[0].left == ()


def test_a_step_that_is_done_again_counts_once():
    marks = [Mark(0, 0), Mark(1, 1), Mark(2, 2), Mark(3, 3), Mark(4, 1), Mark(9, 2), Mark(10, 3)]
    assert [mark.step for mark in kept(marks)] == [0, 1, 1, 1, 1, 2, 3]
    assert [mark.seconds for mark in kept(marks)] == [mark.seconds for mark in marks]


def test_steps_that_nobody_does_again_do_not_count():
    # The job was ended after step 7 and had not started again when time was up.
    assert kept([Mark(0, 0), Mark(5, 7), Mark(6, 5)])[-1].step == 5


@pytest.mark.parametrize(("there", "used"), [(10, 10), (9, 8), (7, 6), (6, 6), (2, 2), (1, 0)])
def test_only_whole_groups_train(there, used):
    members = Members(2)
    members.join(TEN[:there], 0.0)
    assert members.form() == TEN[:used]


def test_the_loss_of_a_node_that_stands_by_stops_nothing():
    members = Members(2)
    members.join(TEN[:9], 0.0)
    members.form()
    assert not members.lose(["n8"])
    assert members.lose(["n0", "n3"])
    # Those that trained stay, in their order.
    assert members.form() == ("n1", "n2", "n4", "n5", "n6", "n7")


def test_nodes_are_waited_for_and_taken_in_whole_groups():
    members = Members(2, window_seconds=1.0)
    members.join(TEN[:6], 0.0)
    members.form()
    members.join(["x"], 10.0)
    assert not members.may_grow(20.0)
    members.join(["y"], 30.0)
    assert not members.may_grow(30.5)
    assert members.may_grow(31.0)
    assert members.form() == (*TEN[:6], "x", "y")


def marks_of(begin, first, number, every, interval=0, extra=0.0):
    """Returns marks of steps; the step after each save takes so much longer."""
    at, found = begin, []
    for step in range(first, first + number):
        at += every + (extra if interval and step > interval and step % interval == 1 else 0.0)
        found.append(Mark(at, step))
    return found


def test_steps_and_saves_are_told_apart():
    ten = marks_of(0.0, 1, 20, 0.5, 8, 0.3)
    six = marks_of(50.0, 40, 10, 0.25, 8, 0.3)
    steps, save = steady_steps([(10, ten), (6, six)], 8)
    assert steps == pytest.approx({10: 0.5, 6: 0.25})
    assert save == pytest.approx(0.3)


def test_what_a_change_costs_is_the_time_beyond_its_steps():
    stop = Stop(100.0, before=10, nodes=9)
    # Two steps of the old world, 4 s of nothing, three of the new one.
    marks = [*marks_of(100.0, 1, 2, 0.5), *marks_of(105.0, 3, 3, 0.75)]
    assert lost_seconds(stop, marks, {10: 0.5, 9: 0.75}, known=2) == pytest.approx(4.0)


def test_a_line_never_falls():
    assert line_through([(6, 11.0), (8, 13.0), (10, 15.0)]) == pytest.approx((5.0, 1.0))
    assert line_through([(6, 15.0), (10, 11.0)]) == pytest.approx((13.0, 0.0))
    assert line_through([(8, 13.0)]) == pytest.approx((13.0, 0.0))


def test_costs_of_a_run_of_ours():
    marks = marks_of(0.0, 1, 21, 0.5, 6, 0.2)
    lost_at = marks[-1].seconds
    nine = marks_of(lost_at + 3.0, 22, 12, 0.75, 6, 0.2)
    joined_at = nine[-1].seconds
    between = marks_of(joined_at, 34, 2, 0.75)
    last = marks_of(between[-1].seconds + 1.0, 36, 12, 0.5, 6, 0.2)
    events = [
        {"event": "recovery", "time": nine[0].seconds, "seconds": {"all": 3.7}, "world_size": 9},
        {"event": "recovery", "time": last[0].seconds, "seconds": {"all": 1.4}, "world_size": 10},
        {"event": "checkpoint_saved", "time": 9.0, "seconds": 1.2, "stall_seconds": 0.1},
    ]
    session = Session(
        Recording([*marks, *nine, *between, *last], events),
        [Stop(lost_at, 10, 9), Stop(joined_at, 9, 10)],
    )
    costs = costs_of_ours(session)
    assert costs.step_seconds == pytest.approx(0.5)
    assert costs.relative_steps == pytest.approx({"9": 1.5, "10": 1.0})
    assert costs.recovery_seconds == pytest.approx(3.0)
    assert costs.join_seconds == pytest.approx(1.0)
    assert costs.join_window_seconds == pytest.approx(1.6, abs=0.01)
    assert costs.our_save.stall_seconds == pytest.approx(0.2)
    assert costs.our_save.persist_seconds == pytest.approx(1.0)


def test_costs_of_a_relaunch():
    first = marks_of(0.0, 1, 21, 0.5, 6, 0.2)
    at, marks, stops, events = first[-1].seconds, [*first], [], []
    for before, nodes, seconds in ((10, 8, 18.0), (8, 6, 16.0), (6, 10, 20.0)):
        stops.append(Stop(at, before, nodes))
        events.append({"event": "rolled_back", "time": at + 0.5, "step": 16})
        marks.append(Mark(at + 0.5, 16))
        started = marks_of(at + seconds, 17, 20, 0.5)
        marks += started
        at = started[-1].seconds
    costs = costs_of_restart(Session(Recording(marks, events), stops))
    assert costs.restart_seconds == pytest.approx(10.0)
    assert costs.restart_seconds_per_node == pytest.approx(1.0)
    assert costs.stock_save.stall_seconds == pytest.approx(0.1, abs=0.11)
    assert costs.relative_steps.keys() == {"6", "8", "10"}


def test_a_start_takes_longer_with_more_nodes():
    costs = Costs(restart_seconds=5.0, restart_seconds_per_node=1.0, load_seconds_per_gib=0.0)
    ended = trace_of((50.0, "remove", "n0"))
    outcome = predict("restart", ended, costs, 10).outcome
    # Eight of the nine that are left start.
    assert outcome.accounts.recovery == pytest.approx(13.0)


def test_a_replay_is_drawn(tmp_path):
    curves = {"ours": [(0.0, 0.0), (5.0, 100.0)], "restart": [(0.0, 0.0), (5.0, 40.0)]}
    plot(tmp_path / "replay.png", curves, trace_of((2.0, "remove", "n0"), (3.0, "add", "n0")))
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_forked_ranks_get_what_torchrun_sets():
    own = forked_ranks.variables(3, 6, 29500)
    assert own == {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@pytest.mark.multiprocess
def test_a_rank_that_fails_ends_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(600)\n"
    )
    program = [sys.executable, forked_ranks.__file__, "3", str(script)]
    assert subprocess.run(program, timeout=120).returncode == 3


def test_what_was_judged_is_read_as_it_was_written(tmp_path):
    judged = Judged(110.0, [Mark(0.0, 0), Mark(60.0, 5)], 2.0, 6, 1.5)
    judged.write(tmp_path / "ours-judged.json")
    assert Judged.read(tmp_path / "ours-judged.json") == judged
    assert judged.samples == 100
    assert judged.off == pytest.approx(0.1)
    # Five of the thirty steps that the time has room for.
    assert judged.goodput(judged.samples) == pytest.approx(5 / 30)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--minutes", "-1"), "'-1' is not a number above 0"),
        (("--speed-up", "0"), "'0' is not a number above 0"),
        (("--trace", "absent"), "absent: No such file"),
        (("--trace", __file__), "line 1 is"),
        (("--costs", "absent"), "no costs of ours"),
        (("--costs", "absent", "--system", "restart"), "no costs of restart"),
        (("--system", "ours"), "no costs of restart"),
        (("--costs", "absent", "--calibrate-only"), "--calibrate-only and --costs"),
    ],
)
def test_what_cannot_be_played_is_said_before_any_process(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        parse(["--out", str(tmp_path), *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_begins_with_too_few_nodes(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("seconds,event,node\n0,add,a\n60,add,b\n")
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path), "--trace", str(path)])
    assert "begins with 1 nodes: 2 are needed" in capsys.readouterr().err


def test_costs_of_an_earlier_call_are_found(tmp_path):
    for name in ("ours", "restart"):
        write_costs(Costs(), tmp_path / f"{name}.json")
    args, trace = parse(["--generated", "--costs", str(tmp_path), "--out", str(tmp_path / "new")])
    assert args.out.is_dir()
    assert trace.seconds == pytest.approx(80 * 60 / 20)
