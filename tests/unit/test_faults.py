"""Faults on demand: how they are written down and when they strike."""

import functools
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.elastic import faults
from megatron_resilient.elastic.faults import Fault, FaultInjector, InjectedError, parse_faults
from megatron_resilient.errors import ConfigError


def test_a_fault_as_in_the_manual():
    (fault,) = parse_faults("kill node=1 step=12")
    assert fault == Fault("kill", "1", step=12)
    assert fault.strikes("node1", 0)
    assert fault.strikes("1", 0)
    assert not fault.strikes("node11", 0)
    assert not fault.strikes("node1", 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is none of kill"),
        ("smash node=1", "'smash' is none of kill"),
        ("kill step=1", "node=... is missing"),
        ("kill node=1 step=x", "invalid literal"),
        ("kill node=1 when=3", "when: known are"),
        ("kill node=1 phase=lunch", "phase=lunch is none of begin"),
        ("slow node=1 seconds=-1", "seconds=-1 must be a positive number"),
        ("random seed=1 nodes=3", "mtbf=... is missing"),
        ("random mtbf=0 nodes=3", "mtbf=0 must be a positive number"),
        ("random mtbf=5 nodes=3 kinds=smash", "kinds=smash"),
    ],
)
def test_what_cannot_be_read_is_named(text, why):
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert str(caught.value).startswith(f'--resilient-fault "{text}": ')
    assert why in str(caught.value)


@settings(max_examples=15, deadline=None)  # ten thousand faults each
@given(st.integers(0, 1000), st.floats(1, 100), st.integers(1, 16))
def test_random_faults_are_the_same_everywhere_and_as_rare_as_asked(seed, mean, nodes):
    text = f"random mtbf={mean} seed={seed} nodes={nodes}"
    drawn = parse_faults(text)
    assert drawn == parse_faults(text)
    times = [fault.at_seconds for fault in drawn]
    assert times == sorted(times)
    assert 0.9 * mean < times[-1] / len(times) < 1.1 * mean
    assert {int(fault.node) for fault in drawn} <= set(range(nodes))


def test_without_the_flag_nothing_strikes():
    assert parse_faults(None) == []


def test_each_strikes_once_at_its_point(monkeypatch):
    killed = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: killed.append(number))
    asked = parse_faults("hang node=2 step=3 phase=save; kill node=1 step=3 phase=save")
    injector = FaultInjector(asked, "node2", 0, began=0.0, cut=print, tell=int)
    for phase, step in [("save", 2), ("forward", 3), ("save", 3), ("save", 3)]:
        injector.point(phase, step)
    assert killed == [signal.SIGSTOP]


def test_an_exception_is_raised_where_it_strikes():
    injector = FaultInjector(
        parse_faults("exception node=0"), "node0", 0, began=0.0, cut=print, tell=int
    )
    injector.point("begin", 1)
    with pytest.raises(InjectedError, match="step 1"):
        injector.point("forward", 1)
    injector.point("forward", 1)


def test_it_is_told_before_a_fault_strikes_how_far_its_process_is(monkeypatch):
    """Else it strikes whoever comes in its place again."""
    order = []
    monkeypatch.setattr("os.kill", lambda pid, number: order.append(number))
    tell = functools.partial(order.append, "told")
    asked = parse_faults("kill node=0 step=3")
    injector = FaultInjector(asked, "node0", 0, began=0.0, cut=print, tell=tell)
    injector.point("forward", 2)
    assert order == []
    injector.point("forward", 3)
    assert order == ["told", signal.SIGKILL]


def test_slow_lasts_as_many_steps_as_asked(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    asked = parse_faults("slow node=0 step=2 steps=2 seconds=0.5")
    injector = FaultInjector(asked, "node0", 0, began=0.0, cut=print, tell=int)
    for step in range(1, 6):
        injector.point("forward", step)
    assert slept == [0.5, 0.5]


def test_a_cut_goes_to_who_has_the_connections():
    cuts = []
    asked = parse_faults("cut node=0 step=2 seconds=7")
    FaultInjector(asked, "node0", 0, began=0.0, cut=cuts.append, tell=int).point("forward", 2)
    assert cuts == [7.0]


def test_faults_before_this_process_began_are_not_for_it(monkeypatch):
    killed = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(faults.time, "time", lambda: 1000.0)
    old = [Fault("kill", "0", at_seconds=900.0), Fault("hang", "0", at_seconds=1005.0)]
    injector = FaultInjector(old, "node0", 0, began=0.0, cut=print, tell=int)
    injector.point("begin", 1)
    monkeypatch.setattr(faults.time, "time", lambda: 1006.0)
    injector.point("begin", 2)
    assert killed == [signal.SIGSTOP]


def test_a_process_that_came_back_is_struck_by_later_faults_only(monkeypatch):
    killed = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: killed.append(number))
    asked = parse_faults("hang node=0 phase=save; kill node=0 step=7; hang node=0 step=8")
    injector = FaultInjector(asked, "node0", 0, began=0.0, cut=print, tell=int, done=6)
    for step in range(7, 10):
        for phase in ("forward", "save"):
            injector.point(phase, step)
    assert killed == [signal.SIGSTOP]
