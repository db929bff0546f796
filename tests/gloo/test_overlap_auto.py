"""Overlap that is planned from measured costs: the same training, and plans that follow reality."""

import json

import pytest

from megatron_resilient.telemetry import read_events
from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

RUN = TINY | {
    "expert_model_parallel_size": 4,
    "moe_aux_loss_coeff": 0,
    "lr": 3e-3,
    "global_batch_size": 8,
    "train_iters": 12,
}
AUTO = {"resilient_overlap": "auto", "resilient_overlap_interval": 4}


def schedules(folder):
    return [event for event in read_events(folder) if event["event"] == "schedule"]


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def test_plans_come_from_costs_and_are_corrected_by_what_is_seen(pools, tmp_path):
    stock = pools.plugin.run(**RUN, resilient_run_dir=str(tmp_path / "stock")).ok()
    profiles = tmp_path / "profiles"
    auto = AUTO | {"resilient_overlap_profiles": str(profiles)}
    first = pools.plugin.run(**RUN, **auto, resilient_run_dir=str(tmp_path / "first")).ok()
    assert relative(first.losses, stock.losses) < 1e-5
    # A later job finds the profile. This one says of links and experts that they are far slower
    # than they are, and that small chunks cost nothing more: so a layer is cut.
    (profile,) = profiles.iterdir()
    told = json.loads(profile.read_text())
    for name, scale in (("a2a", 1e-3), ("gemm", 2e-5)):
        told["samples"][name] = [
            [units, 0.01 + scale * units] for units, _ in told["samples"][name]
        ]
    profile.write_text(json.dumps(told))
    result = pools.plugin.run(**RUN, **auto, resilient_run_dir=str(tmp_path / "second")).ok()
    assert relative(result.losses, stock.losses) < 1e-5
    events = schedules(tmp_path / "second")
    planned = [event for event in events if event["step"] == 2]
    assert {(event["layer"], event["phase"]) for event in planned} == {
        (layer, phase) for layer in (1, 2) for phase in ("forward", "backward")
    }
    assert all(event["degree"] > 1 and "measured" not in event for event in planned)
    # The step after it is looked at: what was planned ran, as planned.
    measured = [event for event in events if event["step"] == 3 and "measured" in event]
    assert len(measured) == 4
    for event in measured:
        before = next(
            own
            for own in planned
            if (own["layer"], own["phase"]) == (event["layer"], event["phase"])
        )
        assert event["degree"] == before["degree"]
        for stream, operations in event["measured"].items():
            chunks = [own[:2] for own in operations]
            assert chunks == [own[:2] for own in event["planned"][stream]]
        assert 0 < event["measured_seconds"] < event["planned_seconds"]
    # Gradients of layer 2 travel while the backward pass is in layer 1.
    assert all(
        (event["gradient_bytes"] > 0) == ((event["layer"], event["phase"]) == (1, "backward"))
        for event in planned
    )
    # Reality was faster: the costs were corrected, and later plans expect less.
    assert "operations take another time than their profile says" in result.outputs[0]
    # Which step was looked at last depends on when plans changed.
    last = {(event["layer"], event["phase"]): event for event in events if event["step"] > 3}
    assert len(last) == 4
    assert max(own["planned_seconds"] for own in last.values()) < min(
        own["planned_seconds"] for own in planned
    )


def test_expert_tensor_parallelism_is_planned_too(pools, tmp_path):
    run = RUN | {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
        "global_batch_size": 4,
        "lr": 1e-4,
        "min_lr": 1e-5,
        "train_iters": 6,
    }
    stock = pools.plugin.run(**run, resilient_run_dir=str(tmp_path / "stock")).ok()
    ours = pools.plugin.run(**run, **AUTO, resilient_run_dir=str(tmp_path / "auto")).ok()
    assert relative(ours.losses, stock.losses) < 1e-5
    for event in schedules(tmp_path / "auto"):
        assert {own[0] for own in event["planned"]["intra"]} == {"allgather", "reducescatter"}
        assert all(own[3] > own[2] for own in event["planned"]["intra"])


def test_costs_are_measured_before_parameters_are_gathered_in_steps(pools, tmp_path):
    """Many buckets, whose gathers hooks begin: what is measured at the start begins none."""
    run = RUN | {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 2000,
        "train_iters": 6,
    }
    stock = pools.plugin.run(**run, resilient_run_dir=str(tmp_path / "stock")).ok()
    ours = pools.plugin.run(**run, **AUTO, resilient_run_dir=str(tmp_path / "auto")).ok()
    assert relative(ours.losses, stock.losses) < 1e-5
    assert (
        "dense gradients are left to Megatron: no gradient slices with --overlap-grad-reduce"
        in (ours.outputs[0])
    )
