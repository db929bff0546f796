"""A member against a coordinator that says what the test wants; real sockets, real threads."""

import threading
import time

import pytest

from megatron_resilient.elastic import member as member_module
from megatron_resilient.elastic.environment import WorkerEnvironment
from megatron_resilient.elastic.member import Fenced, Member
from megatron_resilient.elastic.messages import (
    Beat,
    BoundaryOrder,
    Evidence,
    Exit,
    Fence,
    Finish,
    Hello,
    Paused,
    Ready,
    Whereabouts,
    WhereQuery,
)
from megatron_resilient.errors import (
    ConfigError,
    CoordinatorLostError,
    RefusedError,
    ResilientError,
    TooFewNodesError,
)
from tests.support.fake_coordinator import PATIENCE_SECONDS, TOKEN, FakeCoordinator, world

STATE, SETTINGS = {"step": 3, "grid": [1, 1, 1]}, {"min_nodes": 1}


def environment(port, **changes):
    values = {
        "host": "127.0.0.1",
        "port": port,
        "token": TOKEN,
        "node": "node0",
        "local_rank": 0,
        "local_world": 1,
        "min_nodes": 1,
        "heartbeat_interval": 0.1,
        "heartbeat_timeout": 30.0,
        "fence_timeout": 30.0,
        "coordinator_timeout": 30.0,
    }
    return WorkerEnvironment(**(values | changes))


@pytest.fixture
def coordinator():
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def join(coordinator):
    members = []

    def start(**changes):
        members.append(Member(environment(coordinator.port, **changes)))
        return members[-1]

    yield start
    for one in members:
        one.finish(0)


def seated(coordinator, member, generation=1):
    """Has the member take its seat in a generation."""
    ready = threading.Thread(target=_seat, args=(coordinator, generation))
    ready.start()
    taken = member.next_world(STATE, SETTINGS)
    ready.join()
    return taken


def _seat(coordinator, generation):
    coordinator.wait_for(Ready, count=generation)
    coordinator.send(world(generation))


def until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_member_says_who_it_is_and_gets_its_world(coordinator, join):
    member = join()
    taken = seated(coordinator, member)
    hello = coordinator.hellos[0]
    assert (hello.role, hello.node, hello.local_rank, hello.world) == ("worker", "node0", 0, None)
    assert (taken.generation, taken.rank, taken.seats[0].state) == (1, 0, {"step": 3})
    assert member.world is taken
    assert not member.fenced
    member.check()


def test_beats_carry_progress_and_the_latest_report(coordinator, join):
    member = join()
    seated(coordinator, member)
    member.report(step=4, tokens_per_second=10.0)
    member.report(step=5, tokens_per_second=None)
    beat = coordinator.wait_for(Beat, report={"step": 5})
    assert beat.generation == 1
    assert beat.progress >= 3
    assert beat.busy is None or 0 <= beat.busy <= 1


def test_what_is_told_is_sent_before_the_next_beat_is_due(coordinator, join):
    member = join(heartbeat_interval=60.0)
    seated(coordinator, member)
    member.report(step=6)
    member.tell()
    coordinator.wait_for(Beat, report={"step": 6})


def test_a_fence_reaches_the_main_thread_and_frees_it(coordinator, join):
    member = join()
    cut = threading.Event()
    member.on_fence = cut.set
    seated(coordinator, member)
    coordinator.send(Fence(1, "node3 is lost", time.time()))
    assert cut.wait(PATIENCE_SECONDS)
    with pytest.raises(Fenced, match="node3 is lost"):
        member.check()
    assert seated(coordinator, member, 2).generation == 2
    member.check()


def test_a_fence_of_another_generation_changes_nothing(coordinator, join):
    member = join()
    seated(coordinator, member)
    seen = len(coordinator.received)
    member.leave_generation("test")
    seated(coordinator, member, 2)
    coordinator.send(Fence(1, "late", time.time()))
    coordinator.wait_for(Beat, after=seen, generation=2)
    assert not member.fenced


def test_a_world_that_was_fenced_before_it_began_is_not_taken(coordinator, join):
    member = join()

    def order():
        coordinator.wait_for(Ready)
        coordinator.send(Fence(1, "died again", time.time()))
        coordinator.send(world(1))
        coordinator.wait_for(Ready, count=2)
        coordinator.send(world(2))

    threading.Thread(target=order, daemon=True).start()
    assert member.next_world(STATE, SETTINGS).generation == 2


def test_leaving_a_generation_is_evidence_and_a_fence_of_ones_own(coordinator, join):
    member = join()
    cut = threading.Event()
    member.on_fence = cut.set
    seated(coordinator, member)
    member.leave_generation("Connection reset by peer")
    assert member.fenced
    assert coordinator.wait_for(Evidence) == Evidence(1, "Connection reset by peer")
    assert cut.wait(PATIENCE_SECONDS)


def test_a_fence_cuts_until_the_main_thread_is_out(coordinator, join):
    member = join()
    cuts = []
    member.on_fence = lambda: cuts.append(member.world.generation)
    seated(coordinator, member)
    coordinator.send(Fence(1, "", time.time()))
    until(lambda: len(cuts) >= 3)
    seated(coordinator, member, 2)
    number = len(cuts)
    time.sleep(2 * member_module._CUT_AGAIN_SECONDS)
    assert len(cuts) == number
    assert set(cuts) == {1}


def test_boundaries_are_asked_for_and_answered(coordinator, join):
    member = join()
    seated(coordinator, member)
    assert member.wants_boundary == 0
    coordinator.send(BoundaryOrder(1, ("node2",)))
    until(lambda: member.wants_boundary == 1)
    assert member.leaving() == {"node2"}
    member.boundary(STATE, {"node2", "node1"})
    assert coordinator.wait_for(Paused) == Paused(STATE, ("node1", "node2"))
    seated(coordinator, member, 2)
    assert member.wants_boundary == 0
    assert member.leaving() == set()


def test_training_goes_on_without_the_coordinator_and_its_return_is_noticed(coordinator, join):
    member = join(coordinator_timeout=0.5)
    seated(coordinator, member)
    coordinator.close()
    until(lambda: member.wants_boundary == 2)
    assert not member.fenced
    back = FakeCoordinator(coordinator.port)
    try:
        hello = back.wait_for(Hello)
        until(lambda: member.wants_boundary == 0)
    finally:
        back.close()
    assert hello.id == coordinator.hellos[0].id
    assert hello.world.generation == 1
    assert hello.world.training
    assert [seat.node for seat in hello.world.seats] == ["node0"]


def test_what_waits_is_said_again_after_a_reconnect(coordinator, join):
    member = join()
    seated(coordinator, member)
    member.leave_generation("gone")
    coordinator.wait_for(Evidence)

    def order():
        coordinator.wait_for(Ready, count=2)
        coordinator.drop_all()
        coordinator.wait_for(Ready, count=3)
        coordinator.send(world(2))

    threading.Thread(target=order, daemon=True).start()
    assert member.next_world(STATE, SETTINGS).generation == 2
    assert not coordinator.hellos[-1].world.training


def test_waiting_for_a_seat_ends_when_the_coordinator_stays_away(coordinator, join):
    member = join(coordinator_timeout=0.3)
    seated(coordinator, member)
    member.leave_generation("gone")
    coordinator.close()
    with pytest.raises(CoordinatorLostError, match=f"127.0.0.1:{coordinator.port} was away"):
        member.next_world(STATE, SETTINGS)


def test_another_token_is_told_and_not_tried_again(coordinator, join):
    member = join(token=b"of another job")
    with pytest.raises(RefusedError, match="another token"):
        member.next_world(STATE, SETTINGS)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("TooFewNodesError", TooFewNodesError),
        ("NoSuchError", ResilientError),
        ("os", ResilientError),
    ],
)
def test_exit_orders_become_named_errors(coordinator, join, error, kind):
    member = join()
    seated(coordinator, member)
    coordinator.send(Exit(1, error, "only node0 is left"))
    until(lambda: member.fenced)
    for _ in range(2):
        with pytest.raises(ResilientError, match="only node0 is left") as raised:
            member.check()
        assert type(raised.value) is kind
    with pytest.raises(kind):
        member.next_world(STATE, SETTINGS)


def test_a_planned_exit_is_no_error(coordinator, join):
    member = join()
    seated(coordinator, member)
    coordinator.send(Exit(0, "", "left as planned"))
    with pytest.raises(SystemExit) as leaving:
        member.next_world(STATE, SETTINGS)
    assert leaving.value.code == 0


def test_a_process_that_stood_still_fences_itself_first(coordinator, join, monkeypatch):
    member = join(heartbeat_timeout=5.0)
    seated(coordinator, member)
    cut = threading.Event()
    member.on_fence = cut.set
    real = member_module._clock
    monkeypatch.setattr(member_module, "_clock", lambda: real() + 60)
    assert cut.wait(PATIENCE_SECONDS)
    with pytest.raises(Fenced, match="stood still for 60"):
        member.check()
    assert "stood still" in coordinator.wait_for(Evidence).cause


def test_where_the_main_thread_is(coordinator, join):
    member = join()
    seated(coordinator, member)
    coordinator.send(WhereQuery())
    answer = coordinator.wait_for(Whereabouts)
    assert not answer.in_collective
    assert answer.at


def test_a_failing_watchdog_ends_the_training(coordinator, join):
    member = join()
    seated(coordinator, member)
    said = []
    threading.excepthook, before = lambda hook: said.append(hook.exc_value), threading.excepthook
    try:
        member.on_fence = lambda: 1 / 0
        coordinator.send(Fence(1, "", time.time()))
        until(lambda: said)
    finally:
        threading.excepthook = before
    with pytest.raises(ResilientError, match="watchdog"):
        member.check()


def test_finish_is_said_before_the_process_ends(coordinator):
    member = Member(environment(coordinator.port))
    seated(coordinator, member)
    member.finish(3)
    assert coordinator.wait_for(Finish) == Finish(3)


def test_environment_round_trip():
    one = environment(29400, host="fd00::1")
    assert WorkerEnvironment.read(one.variables()) == one
    assert "secret" not in repr(one)


def test_without_an_agent_there_is_no_member():
    assert WorkerEnvironment.read({}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MEGATRON_RESILIENT_NODE": None}, "MEGATRON_RESILIENT_NODE is not"),
        ({"MEGATRON_RESILIENT_COORDINATOR": "nowhere"}, "is not HOST:PORT"),
        ({"MEGATRON_RESILIENT_HEARTBEAT": "often"}, "could not convert"),
    ],
)
def test_a_broken_environment_is_named(changes, message):
    variables = environment(29400).variables() | changes
    variables = {name: value for name, value in variables.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        WorkerEnvironment.read(variables)
