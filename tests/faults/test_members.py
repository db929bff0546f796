"""Nodes that leave, return, hang or fail in real training, and a coordinator that is killed."""

import os
import re
import signal

import pytest

from tests.support.elastic_pretrain import SLOW, assert_same_run
from tests.support.processes import gone

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

# Every expert has one replica only: whoever goes must hand over.
SINGLE = {"resilient_slots_per_rank": 2, "resilient_min_replicas": 1}
# Long enough to come back, with slots enough to lose two nodes one after the other.
LONG = SLOW | {"train_iters": 60, "resilient_slots_per_rank": 6}
RETURNS = {"rejoin-after": 1, "join-window": 1.5}


def worlds(job):
    return [
        (one["cause"], one["world_size"], *one["lost_nodes"], *one["joined_nodes"])
        for one in job.recoveries
    ]


def test_the_only_holder_of_experts_leaves(start, reference):
    job = start(4, **SINGLE)
    job.until_step(4)
    os.kill(job.node("node1")["agent_pid"], signal.SIGTERM)
    job.ok()
    assert worlds(job) == [("leave", 3, "node1")]
    assert_same_run(job, reference(4, **SINGLE), ["node0", "node2", "node3"])


def test_a_node_is_lost_while_another_leaves(start, reference):
    job = start(
        6,
        resilient_fault="leave node=1 step=4; kill-node node=2 phase=leaving",
    ).ok()
    assert_same_run(job, reference(6), ["node0", "node3", "node4", "node5"])
    assert worlds(job)[0][:3] == ("failure", 5, "node2")
    assert worlds(job)[-1] == ("leave", 4, "node1")


def test_nodes_are_lost_and_return(start, reference):
    """A node that is killed starts again; a worker that is killed is started again by its agent."""
    job = start(
        4,
        RETURNS,
        **LONG,
        resilient_fault="kill-node node=3 step=4 phase=backward; kill node=0 step=45 phase=updated",
    ).ok()
    assert worlds(job)[:3] == [
        ("failure", 3, "node3"),
        ("join", 4, "node3"),
        ("failure", 3, "node0"),
    ]
    assert_same_run(job, reference(4, **LONG), ["node1", "node2"])
    assert len(job.pids()["node3"]) == 2


def test_a_joiner_is_lost_while_it_is_filled(start, reference):
    job = start(
        4,
        RETURNS,
        **LONG,
        resilient_fault="kill-node node=3 step=4 phase=backward; kill-node node=0 phase=leaving",
    ).ok()
    assert worlds(job)[0] == ("failure", 3, "node3")
    assert_same_run(job, reference(4, **LONG), ["node1", "node2"])


@pytest.mark.parametrize("fault", ["hang", "cut"])
def test_a_process_falls_silent_and_comes_back(start, reference, fault):
    """Stopped, or cut off from all others for longer than a silence may last."""
    job = start(
        4,
        {"heartbeat-timeout": 4, "fence-timeout": 30, "join-window": 1.5},
        **LONG,
        resilient_fault=f"{fault} node=2 step=5 phase=backward"
        + (" seconds=8" if fault == "cut" else ""),
    )
    job.until(lambda: job.recoveries)
    zombie = job.pids()["node2"][0]
    assert not gone(zombie)
    if fault == "hang":
        os.kill(zombie, signal.SIGCONT)
    job.until(lambda: gone(zombie))
    job.until_said(r"FencedError: node node2 is a member no longer")
    job.ok()
    assert worlds(job)[0] == ("failure", 3, "node2")
    assert_same_run(job, reference(4, **LONG), ["node0", "node1", "node3"])


def test_main_threads_get_stuck_or_raise(start, reference):
    job = start(
        4,
        {"heartbeat-timeout": 5, "fence-timeout": 7, "hang-timeout": 8, "join-window": 1.5},
        **LONG,
        resilient_fault="exception node=1 step=3 phase=forward;stuck node=2 step=12 phase=backward",
    ).ok(seconds=180)
    assert_same_run(job, reference(4, **LONG), ["node0", "node3"])
    assert re.search(r"InjectedError: injected at step 3", job.output)
    assert re.search(r"node node2 is lost: it hangs in .*faults", job.output), job.tail()


def test_the_coordinator_is_killed_and_returns(start, reference):
    job = start(4, **LONG, resilient_fault="kill-node node=3 step=40 phase=backward")
    job.until_step(5)
    job.kill_coordinator()
    job.until_step(15)
    job.start_coordinator()
    job.until_said("all members are back, training went on")
    job.ok()
    assert worlds(job) == [("failure", 3, "node3")]
    assert_same_run(job, reference(4, **LONG), ["node0", "node1", "node2"])
