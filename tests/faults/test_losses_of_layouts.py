"""Losses of nodes under tensor and pipeline parallelism and with the distributed optimizer."""

import re

import pytest

from tests.support.elastic_pretrain import assert_same_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ALL = {"resilient_slots_per_rank": 8}
TWO_RANKS = {"nproc-per-node": 2}


def test_tensor_parallel_nodes_are_killed(start, reference):
    job = start(
        3,
        TWO_RANKS,
        **TP2,
        **ALL,
        resilient_fault="kill-node node=0 step=4 phase=backward;"
        "kill-node node=2 local_rank=1 step=8 phase=committed",
    ).ok()
    assert_same_run(job, reference(3, TWO_RANKS, **TP2, **ALL), ["node1"])
    assert [one["world_size"] for one in job.recoveries] == [4, 2]


def test_spares_of_a_pipeline_step_in(start, reference):
    """Five ranks hold two blocks of two: the fifth waits, until another one is lost."""
    job = start(
        6,
        **PP2,
        **ALL,
        resilient_fault="kill-node node=5 step=3 phase=backward;"
        "kill-node node=0 step=9 phase=updated",
    ).ok()
    assert_same_run(job, reference(6, **PP2, **ALL), [])
    assert [one["world_size"] for one in job.recoveries] == [4, 4]
    (spare,) = set(job.recoveries[0]["lost_nodes"]) - {"node5"}
    assert job.recoveries[1]["joined_nodes"] == [spare]
    assert "started workers" not in job.output.partition("generation 1")[2]  # nobody starts again


def test_shards_are_lost_one_node_after_the_other(start, reference):
    job = start(
        4,
        **SHARDED,
        **ALL,
        resilient_fault="kill-node node=0 step=2 phase=updated;"
        "kill-node node=2 step=6 phase=backward; kill node=3 step=10 phase=committed",
    ).ok()
    plain = reference(4, **SHARDED, **ALL)
    assert_same_run(job, plain, ["node1"])
    assert [one["world_size"] for one in job.recoveries] == [3, 2, 1]
    assert "shards are kept once" not in plain.output


def test_shards_are_lost_with_overlapped_communication(start, reference):
    job = start(
        4,
        **OVERLAPPED,
        resilient_fault="kill-node node=1 step=5 phase=backward",
    ).ok()
    # The order of sums is another one in another world, and bf16 has eight bits.
    assert_same_run(job, reference(4, **OVERLAPPED), ["node0", "node2", "node3"], tolerance=5e-3)


def test_without_a_mirror_a_lost_shard_comes_from_the_checkpoint(start, reference, tmp_path):
    job = start(
        4,
        **SHARDED,
        no_resilient_mirror=True,
        dist_ckpt_optim_fully_reshardable=True,
        save=str(tmp_path / "save"),
        save_interval=4,
        resilient_fault="kill-node node=1 step=7 phase=backward",
    ).ok()
    assert re.search(r"dense optimizer shards are kept once \(--no-resilient-mirror\)", job.output)
    (recovery,) = job.recoveries
    assert (recovery["source"], recovery["lost_steps"]) == ("checkpoint", 2)
    plain = reference(4, **SHARDED)
    # Each step, as it was done last.
    assert job.losses == pytest.approx(plain.losses, rel=1e-5)
    assert job.samples() == plain.samples()
