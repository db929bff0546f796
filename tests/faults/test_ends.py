"""Runs that cannot go on as they are: what they say, what they save, and how they go on later."""

import os
import signal

import pytest

from tests.support.elastic_pretrain import SLOW, assert_same_run, worst

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

SINGLE = {"resilient_slots_per_rank": 2, "resilient_min_replicas": 1}
LOSS = {"resilient_fault": "kill-node node=3 step=7 phase=backward"}
ENDLESS = {"train_iters": 100_000, "lr_decay_iters": 100}


def test_lost_experts_come_from_the_checkpoint(start, reference, tmp_path):
    plain = reference(4, **SINGLE)
    job = start(4, **SINGLE, **LOSS, save=str(tmp_path / "save"), save_interval=4).ok()
    (recovery,) = job.recoveries
    assert recovery["source"] == "checkpoint"
    assert recovery["lost_steps"] == 0
    holding = {event["layer"]: event["slots"][3] for event in job.events("placement")[:2]}
    lost = sorted([layer, expert] for layer, slots in holding.items() for expert in slots)
    assert sorted(recovery["lost_experts"]) == lost
    assert recovery["lost_expert_tokens"] > 0
    assert "WARNING: no live rank has experts" in job.output
    assert job.samples() == plain.samples()
    difference, _ = worst(job.losses, plain.losses)
    assert 1e-6 < difference < 1e-2, difference


def test_all_go_back_to_the_checkpoint_when_exactness_is_asked_for(start, reference, tmp_path):
    job = start(
        4,
        **SINGLE,
        **LOSS,
        save=str(tmp_path / "save"),
        save_interval=4,
        resilient_require_exact=True,
    ).ok()
    (recovery,) = job.recoveries
    assert (recovery["source"], recovery["step"], recovery["lost_steps"]) == ("checkpoint", 5, 2)
    plain = reference(4, **SINGLE)
    assert job.losses == pytest.approx(plain.losses, rel=1e-5)
    assert job.samples() == plain.samples()


def test_lost_experts_without_a_checkpoint_end_the_run(start):
    job = start(4, **SINGLE, **LOSS)
    assert job.end() != 0
    assert "LostStateError: no live rank has experts" in job.output


@pytest.mark.parametrize("saves", [True, False])
def test_all_nodes_are_lost_at_once(start, reference, tmp_path, saves):
    """Their workers are started again: no run begins anew in silence."""
    save = {"save": str(tmp_path / "save"), "save_interval": 4} if saves else {}
    job = start(2, train_iters=40, **SLOW, **save)
    job.until_step(10)
    for node in ("node0", "node1"):
        os.kill(job.node(node)["pids"][0], signal.SIGKILL)
    if not saves:
        assert job.end() != 0
        assert "LostStateError: no live rank has the state of step" in job.output
        return
    job.ok()
    recovery = job.recoveries[0]  # the second node may join a little later
    assert recovery["source"] == "checkpoint"
    assert recovery["step"] % 4 == 1  # the first step after a checkpoint
    plain = reference(2, train_iters=40, **SLOW)
    assert job.losses == pytest.approx(plain.losses, rel=1e-5)
    assert job.samples() == plain.samples()


def test_too_few_nodes_wait_for_one_that_returns(start, reference):
    job = start(4, {"rejoin-after": 3}, nnodes="4:4", train_iters=14, **LOSS).ok()
    assert_same_run(job, reference(4), ["node0", "node1", "node2"])
    assert [one["world_size"] for one in job.recoveries] == [4]


def test_too_few_nodes_save_and_go_on_later(start, reference, tmp_path):
    save = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1000}
    job = start(4, {"rejoin-timeout": 8}, nnodes="4:4", **save, **LOSS)
    assert job.end() != 0
    assert "TooFewNodesError" in job.output
    assert max(job.losses) == 6
    later = start(3, **save).ok()
    assert min(later.losses) == 7
    plain = reference(4)
    assert job.losses | later.losses == pytest.approx(plain.losses, rel=1e-5)
    done = {step: samples for step, samples in job.samples().items() if step < 7}
    assert done | later.samples() == plain.samples()


def test_a_coordinator_that_stays_away_ends_the_run_with_a_checkpoint(start, tmp_path):
    job = start(
        4,
        {"heartbeat-timeout": 3, "coordinator-timeout": 4},
        **ENDLESS,
        save=str(tmp_path / "save"),
        save_interval=100_000,
    )
    job.until_step(3)
    job.kill_coordinator()
    assert job.end() != 0
    assert "CoordinatorLostError" in job.output
    assert saved_step(tmp_path / "save") == max(job.losses)


def test_a_job_that_is_told_to_end_saves_and_goes_on_later(start, reference, tmp_path):
    save = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1000}
    long = SLOW | {"train_iters": 40, "resilient_slots_per_rank": 8}
    job = start(4, **long, **save)
    job.until_step(5)
    os.kill(job.pid, signal.SIGTERM)
    job.ok()
    assert not job.recoveries  # all left at one boundary
    last = max(job.losses)
    assert 5 <= last < 40
    assert saved_step(tmp_path / "save") == last
    later = start(
        3,
        **long,
        **save,
        resilient_fault=f"kill-node node=0 step={last + 2} phase=backward",
    ).ok()
    plain = reference(4, **long)
    assert job.losses | later.losses == pytest.approx(plain.losses, rel=1e-5)
    done = {step: samples for step, samples in job.samples().items() if step <= last}
    assert done | later.samples() == plain.samples()


def saved_step(folder):
    return int((folder / "latest_checkpointed_iteration.txt").read_text())
