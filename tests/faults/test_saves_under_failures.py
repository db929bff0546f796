"""Per-expert checkpoints when processes die: a save is there whole, or it is not there."""

import pytest

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.verify import damage
from tests.support.elastic_pretrain import assert_same_run, worst

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]

SINGLE = {"resilient_slots_per_rank": 2, "resilient_min_replicas": 1}
LOSS = {"resilient_fault": "kill-node node=3 step=7 phase=backward"}
PARTIAL = {"resilient_checkpoint_experts": 2}


def saving(folder, interval, **changes):
    return {
        "resilient_checkpoint_format": "experts",
        "resilient_checkpoint_keep": 0,
        "save": str(folder),
        "save_interval": interval,
    } | changes


def assert_whole(folder):
    """Every checkpoint that is visible is whole."""
    for step in places.manifests(folder):
        manifest = places.read_manifest(places.manifest_path(folder, step))
        assert damage(folder, manifest) == []


@pytest.mark.parametrize("partial", [False, True], ids=["exact", "partial"])
def test_lost_experts_come_from_the_checkpoint(start, reference, tmp_path, partial):
    save = saving(tmp_path / "save", 2, **(PARTIAL if partial else {}))
    job = start(4, **SINGLE, **LOSS, **save).ok()
    (recovery,) = job.recoveries
    assert (recovery["source"], recovery["lost_steps"]) == ("checkpoint", 0)
    assert recovery["lost_experts"]
    assert "WARNING: no live rank has experts" in job.output
    plain = reference(4, **SINGLE)
    assert job.samples() == plain.samples()
    difference, _ = worst(job.losses, plain.losses)
    assert 1e-6 < difference < 3e-2, difference
    assert places.manifests(tmp_path / "save")[0] == 14
    assert_whole(tmp_path / "save")


def test_all_go_back_when_exactness_is_asked_for(start, reference, tmp_path):
    save = saving(tmp_path / "save", 4)
    job = start(4, **SINGLE, **LOSS, **save, resilient_require_exact=True).ok()
    (recovery,) = job.recoveries
    assert (recovery["source"], recovery["step"], recovery["lost_steps"]) == ("checkpoint", 5, 2)
    plain = reference(4, **SINGLE)
    assert job.losses == pytest.approx(plain.losses, rel=1e-5)
    assert job.samples() == plain.samples()
    assert_whole(tmp_path / "save")
    # Three of four ranks still had their share of that save in memory: only the fourth is read.
    (loaded,) = job.events("checkpoint_loaded")
    manifest = places.read_manifest(places.manifest_path(tmp_path / "save", 4))
    whole = sum(file.bytes for file in manifest.files)
    assert 0 < loaded["bytes"] < whole / 2


@pytest.mark.parametrize("phase", ["save", "copied", "written", "saved"])
def test_everything_is_killed_in_a_save(start, reference, tmp_path, phase):
    """SIGKILL to all processes: new ones begin from the last save that was whole."""
    faults = ";".join(f"kill node={node} step=8 phase={phase}" for node in (0, 1))
    save = saving(tmp_path / "save", 4)
    job = start(2, **save, resilient_fault=faults).ok()
    plain = reference(2)
    assert job.losses == pytest.approx(plain.losses, rel=1e-5)
    assert job.samples() == plain.samples()
    recovery = job.recoveries[0]  # the second node may join a little later
    assert recovery["source"] == "checkpoint"
    # From when a rank has its copy, the save may be there: it is written beside training.
    assert recovery["step"] - 1 in ((4,) if phase == "save" else (4, 8))
    assert_whole(tmp_path / "save")


def test_a_node_dies_while_saves_are_on_their_way(start, reference, tmp_path):
    faults = (
        "kill-node node=1 step=5 phase=copied; kill-node node=2 step=8 phase=written;"
        "kill-node node=0 step=10 phase=save"
    )
    save = saving(tmp_path / "save", 2, **PARTIAL)
    job = start(6, **save, resilient_fault=faults).ok()
    assert_same_run(job, reference(6), ["node3", "node4", "node5"])
    assert {one["source"] for one in job.recoveries} == {"memory"}
    assert places.manifests(tmp_path / "save")[0] == 14
    assert_whole(tmp_path / "save")
    later = start(
        3, **(save | {"load": save["save"]}), train_iters=16, override_opt_param_scheduler=True
    ).ok()
    assert sorted(later.losses) == [15, 16]
