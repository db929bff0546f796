"""Membership: what must hold whatever happens, and each rule by itself."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.elastic.membership import Membership
from megatron_resilient.elastic.messages import (
    AGENT,
    CLIENT,
    WORKER,
    Beat,
    BoundaryOrder,
    Evidence,
    Exit,
    Hello,
    Leave,
    Paused,
    Ready,
    Seated,
    StatusQuery,
    Whereabouts,
    WhereQuery,
    WorkerExit,
)
from megatron_resilient.elastic.orders import Send
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.world import HeldWorld, Seat
from megatron_resilient.errors import ProtocolError
from tests.support.fake_job import LIMITS, FakeJob


def nodes(world):
    return [seat.node for seat in world.seats]


def trains(job, *names):
    """A condition: exactly these nodes train, in one generation."""
    return lambda: [set(nodes(world)) for world in job.complete_generations()] == [set(names)]


def was_formed(job, *names):
    """A condition: there was a generation of exactly these nodes."""
    return lambda: any(set(nodes(world)) == set(names) for world in job.worlds.values())


def started(count=4, **options):
    job = FakeJob(count, **options)
    job.run_until(trains(job, *(f"n{i}" for i in range(count))))
    return job


actions = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "kill worker",
                "kill node",
                "stop",
                "continue",
                "cut",
                "heal",
                "evidence",
                "break",
                "start",
                "leave",
                "stick",
                "restart coordinator",
            ]
        ),
        st.integers(0, 4),
        st.floats(0.0, 4.0),
    ),
    max_size=12,
)


def act(job, what, number):
    node = f"n{number}"
    there = job.of(node)
    if what == "start":
        job.start_node(node)
    elif what == "restart coordinator":
        job.restart_coordinator()
    elif node not in job.agents:
        return
    elif what == "kill node":
        job.kill_node(node)
    elif what == "cut":
        job.cut_off(node)
    elif what == "heal":
        job.heal(node)
    elif what == "leave":
        job.leave(node)
    elif there:
        worker = there[number % len(there)]
        if what == "kill worker":
            job.kill_worker(worker)
        elif what == "stop":
            worker.stopped = True
        elif what == "continue":
            worker.stopped = False
        elif what == "evidence":
            job.evidence(worker)
        elif what == "break":
            job.break_connection(worker)
        elif what == "stick":
            worker.stuck = True


@settings(max_examples=25, deadline=None)
@given(
    actions=actions,
    grid=st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1)]),
    local_world=st.integers(1, 2),
    seed=st.integers(0, 999),
    crowded=st.booleans(),
)
def test_whatever_happens_there_is_one_generation_and_it_goes_on(
    actions, grid, local_world, seed, crowded
):
    # FakeJob asserts at every step that at most one generation can commit a step, that nobody is
    # seated who has not left its generation, and that no number is given twice to one process.
    job = FakeJob(4, local_world, grid, seed=seed, crowded=crowded)
    for what, number, seconds in actions:
        act(job, what, number)
        job.run(seconds)
    for node in list(job.agents):
        job.heal(node)
    for worker in job.workers:
        worker.stopped = False
    job.run(30)
    if job.end is None:
        left = len(job.alive) // (grid[0] * grid[2]) * grid[0] * grid[2]
        seated = sum(len(world.seats) for world in job.complete_generations())
        # Who waits for a seat that it completes no block for stays a spare.
        assert seated == left, job.machine.describe(job.now)


def test_the_start_waits_for_late_ones_within_the_window():
    job = FakeJob(2)
    job.run(1.2)
    job.start_node("n2")
    job.run_until(lambda: job.complete_generations())
    assert nodes(job.worlds[1]) == ["n0", "n1", "n2"]
    assert job.worlds[1].cause == "start"
    assert job.worlds[1].joined_nodes == ("n0", "n1", "n2")
    assert [event.fields["member"] for event in job.recorded("member_join")] == ["n0", "n1", "n2"]


def test_too_few_nodes_do_not_start():
    job = FakeJob(2, min_nodes=3)
    job.run(30)
    assert not job.worlds
    job.start_node("n2")
    job.run_until(trains(job, "n0", "n1", "n2"))


def test_a_killed_node_is_gone_in_the_next_generation():
    job = started()
    job.kill_node("n0")
    job.run_until(trains(job, "n1", "n2", "n3"), 3)
    world = job.worlds[2]
    assert (world.cause, world.lost_nodes, world.planned) == ("failure", ("n0",), False)
    assert world.times["evidence"] <= world.times["fence"] <= world.times["formed"]
    failures = [event for event in job.recorded("failure") if event.fields["failed_nodes"]]
    assert [event.fields["failed_nodes"] for event in failures] == [["n0"]]
    assert failures[0].fields["failed_ranks"] == [0]


@pytest.mark.parametrize("dead", [1, 2, 3])
def test_any_number_of_proven_deaths_is_survived(dead):
    job = started()
    for number in range(dead):
        job.kill_node(f"n{number}")
    job.run_until(trains(job, *(f"n{i}" for i in range(dead, 4))), 5)


def test_a_node_of_which_one_worker_died_comes_back_as_a_new_one():
    job = started(3, local_world=2)
    job.kill_worker(job.of("n1")[0])
    job.run_until(trains(job, "n0", "n2"), 3)
    job.run_until(trains(job, "n0", "n1", "n2"), 10)
    last = job.worlds[max(job.worlds)]
    assert (last.cause, last.joined_nodes, last.lost_nodes) == ("join", ("n1",), ())


def test_a_zombie_never_returns():
    job = started()
    zombie = job.of("n2")[0]
    zombie.stopped = True
    job.run_until(trains(job, "n0", "n1", "n3"), 5)
    zombie.stopped = False
    job.run_until(lambda: not zombie.alive, 5)
    assert zombie.told.error == "FencedError"
    job.run_until(trains(job, "n0", "n1", "n2", "n3"), 10)


def test_the_smaller_side_of_a_cut_does_not_train_on():
    job = started(5)
    for node in ("n0", "n1", "n2"):
        job.cut_off(node)
    job.run(LIMITS.rejoin_timeout - 2)
    assert max(job.worlds) == 1
    job.run(10)
    assert job.end.code == 1
    assert {
        worker.told.error for node in ("n3", "n4") for worker in job.workers if worker.node == node
    } == {"PartitionError"}


def test_the_larger_side_of_a_cut_does():
    job = started(5)
    for node in ("n0", "n1"):
        job.cut_off(node)
    job.run_until(trains(job, "n2", "n3", "n4"), 8)
    for node in ("n0", "n1"):
        job.heal(node)
    job.run_until(trains(job, "n0", "n1", "n2", "n3", "n4"), 20)


def test_a_cut_side_that_comes_back_in_time_goes_on_together():
    job = started(5)
    for node in ("n0", "n1", "n2"):
        job.cut_off(node)
    job.run(5)
    for node in ("n0", "n1", "n2"):
        job.heal(node)
    job.run_until(trains(job, "n0", "n1", "n2", "n3", "n4"), 20)


def test_an_exception_of_one_rank_loses_nobody():
    job = started()
    job.evidence(job.of("n1")[0])
    job.run_until(lambda: 2 in job.worlds, 3)
    assert (job.worlds[2].lost_nodes, job.worlds[2].planned) == ((), False)
    job.run_until(trains(job, "n0", "n1", "n2", "n3"), 3)
    assert [event.fields["failed_nodes"] for event in job.recorded("failure")] == [[]]


def test_the_last_sign_of_a_spare_is_not_that_of_a_member():
    job = FakeJob(2, grid=(1, 1, 2))
    job.run_until(trains(job, "n0", "n1"))
    job.start_node("n2")
    job.run(3)
    job.of("n2")[0].stopped = job.agents["n2"].stopped = True
    job.run(10)
    job.start_node("n3")
    job.run(3)
    job.kill_node("n1")
    job.run_until(trains(job, "n0", "n3"), 5)
    times = job.worlds[2].times
    assert times["last_sign"] == times["evidence"]


def test_a_main_thread_that_does_not_come_out_is_dropped():
    job = started()
    job.of("n1")[0].stuck = True
    job.evidence(job.of("n2")[0])
    job.run(2)
    assert max(job.worlds) == 1
    job.run_until(trains(job, "n0", "n2", "n3"), 5)


def test_who_hangs_outside_a_collective_is_dropped():
    job = started()
    for worker in job.workers:
        worker.frozen = True
    job.of("n3")[0].in_collective = False
    job.run_until(lambda: 2 in job.worlds, 15)
    assert nodes(job.worlds[2]) == ["n0", "n1", "n2"]


def test_a_collective_that_hangs_for_all_is_done_again_by_all():
    job = started()
    for worker in job.workers:
        worker.frozen = True
    job.run_until(lambda: 2 in job.worlds, 15)
    assert nodes(job.worlds[2]) == ["n0", "n1", "n2", "n3"]


def test_when_nobody_is_in_a_collective_nobody_is_dropped():
    job = started()
    for worker in job.workers:
        worker.frozen, worker.in_collective = True, False
    job.run(30)
    assert max(job.worlds) == 1


def test_arrivals_within_the_window_join_together():
    job = started(2)
    job.start_node("n2")
    job.run(0.5)
    job.start_node("n3")
    job.run_until(trains(job, "n0", "n1", "n2", "n3"), 10)
    assert job.worlds[2].joined_nodes == ("n2", "n3")
    assert job.worlds[2].cause == "join"
    assert not job.recorded("failure")


def test_a_planned_departure_loses_nothing():
    job = started()
    leaver = job.of("n0")[0]
    job.leave("n0")
    job.run_until(trains(job, "n1", "n2", "n3"), 5)
    world = job.worlds[2]
    assert (world.cause, world.lost_nodes, world.planned) == ("leave", ("n0",), True)
    job.run_until(lambda: not job.agents["n0"].alive, 3)
    assert leaver.told.code == 0
    assert job.agents["n0"].code == 0
    assert not job.recorded("failure")
    assert [event.fields["member"] for event in job.recorded("member_leave")] == ["n0"]


def test_a_leaver_takes_part_in_a_recovery_and_leaves_then():
    job = started()
    job.leave("n0")
    job.kill_node("n1")
    job.run_until(trains(job, "n2", "n3"), 10)
    assert any("n0" in nodes(world) for g, world in job.worlds.items() if g > 1)
    assert job.worlds[max(job.worlds)].planned


@pytest.mark.parametrize("seed", range(8))
def test_a_leaver_without_a_seat_gives_what_it_holds_before_it_goes(seed):
    job = started(4, grid=(1, 1, 2), seed=seed)
    job.leave("n3")
    job.kill_node("n0")
    job.run_until(lambda: not job.agents["n3"].alive, 15)  # FakeJob asserts that nothing is lost
    assert job.agents["n3"].code == 0
    assert [nodes(world) for world in job.complete_generations()] == [["n1", "n2"]]


@pytest.mark.parametrize("seed", range(8))
def test_a_leaver_gives_again_if_those_it_gave_to_fail_before_the_next_step(seed):
    job = started(4, grid=(1, 1, 2), seed=seed)
    for worker in job.workers:
        worker.frozen, worker.step = True, 1
    job.leave("n3")
    job.kill_node("n0")
    job.run_until(lambda: any(nodes(world) == ["n1", "n2"] for world in job.worlds.values()), 10)
    job.kill_node("n1")
    job.run_until(
        lambda: any(set(nodes(world)) == {"n2", "n3"} for world in job.worlds.values()), 10
    )


def test_a_spare_beside_a_member_is_used_when_others_join():
    job = started(5, local_world=2, grid=(1, 1, 3))
    assert [len(world.seats) for world in job.complete_generations()] == [9]
    job.start_node("n5")
    job.run_until(lambda: any(len(world.seats) == 12 for world in job.complete_generations()))


def test_a_node_that_left_comes_back_while_the_others_wait_for_nodes():
    job = started(3, min_nodes=3)
    job.leave("n2")
    job.run_until(lambda: not job.agents["n2"].alive, 5)
    job.start_node("n2")
    job.run_until(trains(job, "n0", "n1", "n2"), 5)
    assert not job.worlds[2].final


def test_the_last_node_that_leaves_saves():
    job = started(1)
    job.leave("n0")
    job.run_until(lambda: job.end is not None, 5)
    assert job.end.code == 0
    assert max(job.worlds) == 1


@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_leave_while_a_boundary_is_awaited_leave_at_it(seed):
    job = started(4, seed=seed)
    busy = job.of("n3")[0]
    busy.stopped = True  # in a long step: nobody gets to a boundary
    job.leave("n0")
    job.run(0.8)
    for node in ("n1", "n2", "n3"):
        job.leave(node)
    job.run(0.6)
    busy.stopped = False
    job.run_until(lambda: job.end is not None, 5)
    assert job.end.code == 0
    assert max(job.worlds) == 1
    assert not job.recorded("failure")


def test_a_leaver_that_the_boundary_was_not_told_of_stays_until_the_next():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    for number in (0, 1, 2):
        machine.connected(0.0, number, held(True, f"n{number}", count=3), "h")
        machine.connected(0.0, 9 - number, Hello(AGENT, f"n{number}", f"agent-{number}"), "h")
    machine.received(0.5, 9, Leave())
    assert sent(machine.tick(1.0), 2) == [BoundaryOrder(1, ("n0",))]
    machine.received(1.0, 8, Leave())
    assert sent(machine.tick(1.4), 2) == [BoundaryOrder(1, ("n0", "n1"))]
    for number in (0, 1, 2):  # they agreed before they heard of n1
        machine.received(1.5, number, Paused({}, ("n0",)))
    orders = machine.store_opened(1.5, 6, 1)
    for number in (1, 2):
        orders += machine.received(1.6, number, replace(ready(), after=4))
    world, again = sent(orders, 2)
    assert nodes(world) == ["n1", "n2"]
    assert again == BoundaryOrder(1, ("n1",))


def test_too_few_nodes_wait_and_then_save():
    job = started(4, min_nodes=3)
    job.kill_node("n0")
    job.kill_node("n1")
    job.run(8)
    assert max(job.worlds) == 1
    job.run_until(lambda: 2 in job.worlds, 10)
    assert job.worlds[2].final
    job.run_until(lambda: job.end is not None, 3)
    assert job.end.code == 1
    assert "TooFewNodesError" in {event.fields.get("type") for event in job.recorded("error")}


def test_too_few_nodes_are_helped_by_a_joiner():
    job = started(3, min_nodes=3)
    job.kill_node("n0")
    job.run(4)
    job.start_node("n7")
    job.run_until(trains(job, "n1", "n2", "n7"), 5)
    assert not job.worlds[2].final


def test_training_that_is_done_ends_the_job():
    job = started(2)
    for worker in job.alive:
        job.finish(worker)
        job.run(0.5)
    job.run_until(lambda: job.end is not None, 3)
    assert job.end.code == 0


def test_training_goes_on_through_a_restart_of_the_coordinator():
    job = started()
    job.restart_coordinator()
    job.run(5)
    assert trains(job, "n0", "n1", "n2", "n3")()
    assert max(job.worlds) == 1
    job.kill_node("n3")
    job.run_until(trains(job, "n0", "n1", "n2"), 5)


def test_a_node_that_dies_while_the_coordinator_is_away_is_missed():
    job = started()
    job.kill_node("n3")
    job.restart_coordinator()
    job.run_until(trains(job, "n0", "n1", "n2"), 8)


def test_a_coordinator_that_dies_in_a_recovery_is_replaced():
    for steps in range(12):
        job = started(seed=steps)
        job.kill_node("n3")
        for _ in range(steps):
            job.step()
        job.restart_coordinator()
        job.run_until(trains(job, "n0", "n1", "n2"), 10)


def test_a_worker_that_misses_its_world_is_told_again():
    for seed in range(20):
        job = FakeJob(3, seed=seed)
        job.run_until(lambda job=job: job.machine.generation == 1)
        job.break_connection(job.of("n1")[0])
        job.run_until(trains(job, "n0", "n1", "n2"), 5)
        job.run(3)
        assert max(job.worlds) == 1


def test_our_own_standstill_is_nobodys_silence():
    job = started()
    job.now += 100
    job.run(3)
    assert trains(job, "n0", "n1", "n2", "n3")()
    assert max(job.worlds) == 1


def test_our_own_standstill_counts_for_no_limit():
    job = started(3, min_nodes=3)
    job.break_connection(job.of("n1")[0])
    job.agents["n1"].wire.closing, job.agents["n1"].wire = True, None
    while job.wires.keys() - {c.wire.key for c in (*job.workers, *job.agents.values()) if c.wire}:
        for wire in list(job.wires.values()):
            job._deliver(wire)
    job.now += 100  # longer than the grace of a connection
    job.run(3)
    assert max(job.worlds) == 1
    job.kill_node("n2")
    job.run(3)
    job.now += 100  # longer than `rejoin_timeout`
    job.run(3)
    assert job.end is None
    job.start_node("n2")
    job.run_until(trains(job, "n0", "n1", "n2"), 5)


def hello(node, number, role=WORKER):
    return Hello(role, node if role == WORKER else "", f"process-{number}")


def ready(digest="d", grid=(1, 1, 1)):
    state = {"generation": 0, "step": 0, "coordinate": None, "grid": list(grid)}
    return Ready(state, {"min_nodes": 1, "flags_digest": digest})


def sent(orders, key):
    return [order.message for order in orders if isinstance(order, Send) and order.key == key]


def test_other_settings_are_refused_by_name():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    for number in range(2):
        machine.connected(0.0, number, hello(f"n{number}", number), "h")
    machine.received(0.0, 0, ready())
    told = sent(machine.received(0.0, 1, ready("other")), 1)[0]
    assert (told.code, told.error) == (2, "RefusedError")
    assert "n1" in told.message
    assert "flags_digest" in told.message


def test_flags_of_one_that_died_before_the_start_bind_nobody():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 0, hello("n0", 0), "h")
    machine.received(0.0, 0, ready("wrong"))
    machine.disconnected(0.1, 0)
    machine.connected(0.2, 1, hello("n0", 1), "h")
    assert sent(machine.received(0.2, 1, ready("right")), 1) == []
    machine.connected(0.3, 2, hello("n1", 2), "h")
    told = sent(machine.received(0.3, 2, ready("wrong")), 2)[0]
    assert "'wrong' is not 'right'" in told.message


def test_a_leaver_that_is_needed_and_does_not_come_out_is_not_waited_for_for_ever():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    for number in (0, 1):
        machine.connected(0.0, number, held(True, f"n{number}"), "h")
        machine.connected(0.0, 9 - number, Hello(AGENT, f"n{number}", f"agent-{number}"), "h")
    machine.received(0.5, 8, Leave())
    machine.tick(1.0)
    machine.received(1.1, 1, Paused({}))
    machine.received(1.1, 0, replace(ready(grid=(2, 1, 1)), after=4))
    orders = []
    for second in range(2, 20):
        for key in (0, 1, 8, 9):
            orders += machine.received(second, key, Beat())
        orders += machine.tick(second)
    (told,) = sent(orders, 1)[:1]
    assert told.error == "HangError"
    assert machine.ended


def test_a_shortage_that_passed_does_not_count_in_the_next_one():
    machine = Membership(Rules(limits=LIMITS, min_nodes=2), 0.0)
    machine.connected(0.0, 0, held(True), "h")
    machine.connected(0.0, 1, held(True, "n1"), "h")
    machine.disconnected(1.0, 1)
    machine.tick(1.6)
    machine.received(1.7, 0, replace(ready(), after=4))  # the store is not there
    assert machine.describe(2.0)["phase"] == "waiting for nodes"
    machine.connected(2.0, 2, hello("n2", 2), "h")
    machine.received(2.0, 2, ready())
    assert machine.describe(2.0)["phase"] == "recovering"


def test_a_node_id_that_is_taken_is_refused():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 0, hello("n0", 0), "h")
    told = sent(machine.connected(0.1, 1, hello("n0", 1), "h"), 1)[0]
    assert (told.code, told.error) == (2, "RefusedError")
    assert "n0" in told.message


def test_what_makes_no_sense_is_a_protocol_error():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 0, hello("n0", 0), "h")
    for wrong in (ready(grid=(0, 1, 1)), ready(grid=(1, 1)), Leave(), StatusQuery()):
        with pytest.raises(ProtocolError):
            machine.received(0.0, 0, wrong)
    machine.connected(0.0, 1, hello("", 1, CLIENT), "h")
    with pytest.raises(ProtocolError):
        machine.received(0.0, 1, ready())


def test_the_status_names_members_and_what_they_report():
    job = started(2)
    job.run(2)
    status = job.machine.describe(job.now)
    assert status["phase"] == "training"
    assert status["generation"] == 1
    assert status["step"] > 0
    assert [node["ranks"] for node in status["nodes"]] == [[0], [1]]
    assert all(node["role"] == "member" and node["pids"] for node in status["nodes"])
    job.kill_node("n1")
    job.run_until(trains(job, "n0"), 5)
    assert job.machine.describe(job.now)["last_recovery"]["lost_nodes"] == ["n1"]


def test_a_node_that_died_is_no_longer_shown():
    job = started(3)
    job.kill_node("n2")
    job.run_until(trains(job, "n0", "n1"), 5)
    assert [node["node"] for node in job.machine.describe(job.now)["nodes"]] == ["n0", "n1"]


def test_progress_of_an_older_generation_is_none_of_this_one():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    for number in (0, 1):
        machine.connected(0.0, number, held(True, f"n{number}"), "h")
    orders = []
    for tenth in range(100):
        for key, generation in ((0, 3), (1, 4)):
            orders += machine.received(tenth / 10, key, Beat(generation, tenth * (key == 0)))
        orders += machine.tick(tenth / 10)
    assert WhereQuery() in sent(orders, 0)


def test_who_was_refused_is_told_again_when_it_comes_back():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 0, hello("n0", 0), "h")
    machine.received(0.0, 0, ready())
    machine.connected(0.0, 1, hello("n1", 1), "h")
    refused = sent(machine.received(0.0, 1, ready("other")), 1)
    machine.disconnected(0.1, 1)
    assert sent(machine.connected(0.2, 2, hello("n1", 1), "h"), 2) == refused


def formed(machine, now):
    """Lets time pass until the store is there and a generation is formed."""
    orders = []
    for tenth in range(5):
        orders += machine.store_opened(now + tenth / 10, machine.generation + 1, 1)
        orders += machine.tick(now + tenth / 10)
    return orders


def test_a_world_that_was_lost_and_is_over_is_not_waited_for():
    machine = Membership(Rules(limits=LIMITS, max_nodes=2), 0.0)
    for number in range(2):
        machine.connected(0.0, number, hello(f"n{number}", number), "h")
        machine.received(0.0, number, replace(ready(), after=0))
    machine.tick(0.8)
    (world,) = [m for m in sent(formed(machine, 1.5), 0) if isinstance(m, Seated)]
    machine.disconnected(1.9, 1)  # before it read its world
    machine.received(1.9, 0, Evidence(world.generation, "x"))
    machine.received(1.9, 0, replace(ready(), after=world.generation))
    machine.connected(1.95, 2, hello("n1", 1), "h")
    orders = machine.received(1.95, 2, replace(ready(), after=0))
    (again,) = [m for m in sent(orders, 2) if isinstance(m, Seated)]
    assert nodes(again) == ["n0", "n1"]


def held(training, node="n0", count=2):
    seats = tuple(Seat(f"n{number}", 0, {}) for number in range(count))
    world = HeldWorld(generation=4, formed=9.0, seats=seats, step=7, training=training)
    return replace(hello(node, int(node[1])), world=world)


def test_our_own_standstill_leaves_time_to_say_where_one_is():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    for number in (0, 1):
        machine.connected(0.0, number, held(True, f"n{number}"), "h")
    now, orders = 0.0, []
    while WhereQuery() not in sent(orders, 0):
        now += 0.5
        for key in (0, 1):
            assert not machine.received(now, key, Beat(4, 0))
        orders = machine.tick(now)
    assert not machine.tick(now + 100)[1:]  # it logs that it stood still
    assert not sent(machine.received(now + 100, 0, Whereabouts(True, "f")), 0)
    (fence,) = sent(machine.received(now + 100, 1, Whereabouts(True, "f")), 0)
    assert fence.generation == 4


def test_after_a_restart_one_that_is_out_ends_the_generation_for_all():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    assert sent(machine.connected(0.0, 0, held(True), "h"), 0) == []
    orders = machine.connected(0.1, 1, held(False, "n1"), "h")
    assert [message.generation for message in sent(orders, 0)] == [4]
    assert machine.describe(0.1)["step"] == 7


def test_after_a_restart_spares_that_are_as_many_as_a_job_may_have_do_not_start_one():
    machine = Membership(Rules(limits=LIMITS, max_nodes=2), 0.0)
    for number in (7, 8):
        machine.connected(0.0, number, hello(f"n{number}", number), "h")
        machine.received(0.0, number, ready())
    formed(machine, 0.1)
    for number in (0, 1):
        assert sent(machine.connected(0.6, number, held(True, f"n{number}"), "h"), number) == []
    assert machine.generation == 4


@pytest.mark.parametrize("order", ["old first", "new first", "exit first"])
def test_after_a_restart_a_worker_that_was_replaced_meanwhile_is_lost_at_once(order):
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 9, Hello(AGENT, "n1", "agent-of-n1"), "h")
    events = [
        lambda: machine.connected(0.1, 0, held(True), "h"),
        lambda: machine.connected(0.1, 2, replace(hello("n1", 2), pid=22), "h"),
        lambda: machine.received(0.1, 9, WorkerExit(0, -9, 11)),
    ]
    orders = []
    for index in {"old first": (0, 1, 2), "new first": (1, 0, 2), "exit first": (0, 2, 1)}[order]:
        orders += events[index]()
    orders += machine.received(0.2, 0, replace(ready(), after=4))
    orders += machine.received(0.2, 2, replace(ready(), after=0))
    orders += machine.store_opened(0.3, 6, 1)
    (world,) = [message for message in sent(orders, 0) if isinstance(message, Seated)]
    assert world.lost_nodes == ("n1",)
    assert not any(isinstance(message, Exit) for message in sent(orders, 2))


def test_after_a_restart_a_leaver_is_not_let_go_before_its_workers_are_back():
    machine = Membership(Rules(limits=LIMITS), 0.0)
    machine.connected(0.0, 9, Hello(AGENT, "n0", "agent-of-n0"), "h")
    assert sent(machine.received(0.0, 9, Leave()), 9) == []
    machine.connected(0.1, 0, held(True), "h")
    orders = machine.connected(0.2, 1, held(True, "n1"), "h")
    assert sent(orders, 9) == []
    assert sent(machine.tick(0.4), 0) == [BoundaryOrder(1, ("n0",))]


def test_who_leaves_at_about_the_same_time_leaves_at_one_boundary():
    machine = Membership(Rules(limits=LIMITS, leave_window=0.3), 0.0)
    for number in (0, 1):
        machine.connected(0.0, 9 - number, Hello(AGENT, f"n{number}", f"agent-{number}"), "h")
        machine.connected(0.1, number, held(True, f"n{number}"), "h")
    for number, at in ((0, 1.0), (1, 1.2)):
        assert sent(machine.received(at, 9 - number, Leave()), 0) == []
    assert sent(machine.tick(1.4), 0) == []
    assert sent(machine.tick(1.6), 0) == [BoundaryOrder(1, ("n0", "n1"))]
