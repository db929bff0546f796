"""Nodes die in real training, by real signals: the next step is the next step of all others."""

import pytest

from tests.support.elastic_pretrain import assert_same_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]


def nodes_of(*numbers):
    return [f"node{number}" for number in numbers]


# Evaluates and moves experts within fourteen steps.
BUSY = {
    "split": "80,10,10",
    "eval_interval": 4,
    "eval_iters": 1,
    "resilient_rebalance_interval": 3,
    "resilient_rebalance_threshold": 0,
    "resilient_expert_load_interval": 1,
}


@pytest.mark.parametrize(
    ("nodes", "faults", "survivors", "worlds"),
    [
        pytest.param(
            4, "kill-node node=3 step=1 phase=backward", nodes_of(0, 1, 2), [3], id="first-step"
        ),
        pytest.param(
            6,
            "kill-node node=1 step=5 phase=forward; kill-node node=4 step=5 phase=forward",
            nodes_of(0, 2, 3, 5),
            None,
            id="two-of-6",
        ),
        pytest.param(
            6,
            "kill-node node=0 step=3 phase=gradients; kill-node node=1 step=6 phase=commit;"
            "kill-node node=2 step=9 phase=committed",
            nodes_of(3, 4, 5),
            [5, 4, 3],
            id="three-times-the-first",
        ),
        pytest.param(
            6,
            "kill-node node=0 step=5 phase=updated; kill-node node=3 step=5 phase=updated;"
            "kill-node node=5 step=8 phase=begin",
            nodes_of(1, 2, 4),
            None,
            id="first-and-another",
        ),
        pytest.param(
            6,
            "kill-node node=5 step=4 phase=replicas; kill-node node=1 step=4 phase=recovery;"
            "kill-node node=2 step=4 phase=refill",
            nodes_of(0, 3, 4),
            [3],
            id="during-recovery",
        ),
        pytest.param(
            6,
            "kill-node node=1 step=5 phase=committed; kill-node node=0 step=5 phase=refill;"
            "kill-node node=2 step=6 phase=updated",
            nodes_of(3, 4, 5),
            [4, 3],
            id="again-before-the-last-step-is-logged",
        ),
    ],
)
def test_nodes_are_killed(start, reference, nodes, faults, survivors, worlds):
    job = start(nodes, resilient_fault=faults).ok()
    assert_same_run(job, reference(nodes), survivors)
    if worlds is not None:
        assert [one["world_size"] for one in job.recoveries] == worlds


@pytest.mark.parametrize(
    ("faults", "survivors", "worlds"),
    [
        pytest.param(
            "kill-node node=1 step=4 phase=evaluate; kill-node node=2 step=10 phase=save;"
            "kill-node node=4 step=12 phase=migration",
            nodes_of(0, 3, 5),
            [5, 4, 3],
            id="others",
        ),
        pytest.param(
            "kill-node node=0 step=3 phase=migration; kill-node node=5 step=5 phase=save;"
            "kill-node node=1 step=8 phase=evaluate",
            nodes_of(2, 3, 4),
            [5, 4, 3],
            id="first",
        ),
    ],
)
def test_nodes_are_killed_beside_training(start, reference, tmp_path, faults, survivors, worlds):
    plain = reference(6, **BUSY)
    save = {"save": str(tmp_path / "save"), "save_interval": 5}
    job = start(6, resilient_fault=faults, **BUSY, **save).ok()
    assert_same_run(job, plain, survivors)
    assert [one["world_size"] for one in job.recoveries] == worlds
    assert evaluations(job) == pytest.approx(evaluations(plain), rel=1e-5)
    saved = {event["step"] for event in job.events("checkpoint_saved")}
    assert saved == {5, 10, 14}


def evaluations(job):
    return {event["step"]: event["loss"]["lm loss"] for event in job.events("evaluation")}
