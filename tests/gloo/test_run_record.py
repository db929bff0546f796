"""What real training runs on four gloo ranks write about themselves."""

import json

import pytest

from megatron_resilient.telemetry import read_events

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LAYERS, EXPERTS, TOPK = 4, 8, 2
TOKENS = 8 * 128  # of a step: global batch x sequence
PP2_EP2 = {"pipeline-model-parallel-size": 2, "expert-model-parallel-size": 2}


@pytest.fixture(scope="module")
def pool(pools):
    return pools.plugin


def train(pool, run_dir, **changes) -> list[dict]:
    """Runs the small model as a script and returns the events of this job alone."""
    before = len(read_events(run_dir)) if (run_dir / "events.jsonl").exists() else 0
    options = PP2_EP2 | {"resilient-run-dir": run_dir, "resilient-expert-load-interval": 2}
    pool.run(as_script=True, **(options | changes)).ok()
    return read_events(run_dir)[before:]


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def loads(events: list[dict]) -> dict[tuple[int, int], tuple[list[int], int]]:
    """{(layer, step): (tokens per expert, steps that they cover)}; every key only once."""
    found = of_kind(events, "expert_load")
    by_key = {(e["layer"], e["step"]): (e["tokens"], e["steps"]) for e in found}
    assert len(by_key) == len(found)
    return by_key


def check_loads(events: list[dict], steps: dict[int, int], layers: int = LAYERS) -> None:
    """Every token of every step went to TOPK experts, in every layer; `steps`: step -> covered."""
    found = loads(events)
    assert found.keys() == {(layer, step) for layer in range(1, layers + 1) for step in steps}
    for (_, step), (tokens, covered) in found.items():
        assert len(tokens) == EXPERTS
        assert covered == steps[step]
        assert sum(tokens) == TOKENS * TOPK * covered


@pytest.fixture(scope="module")
def first_run(pool, tmp_path_factory):
    """Five steps with an evaluation, a checkpoint and TensorBoard: (run folder, events)."""
    folder = tmp_path_factory.mktemp("first")
    changes = {
        "save": folder,
        "save-interval": 5,
        "train-iters": 5,
        "eval-interval": 2,
        "eval-iters": 1,
        "split": "90,5,5",
        "resilient-run-dir": None,  # the --save folder then
        "tensorboard-dir": folder / "tensorboard",
    }
    return folder, train(pool, folder, **changes)


def test_steps_are_recorded_once(first_run):
    _, events = first_run
    steps = of_kind(events, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert step["tokens"] == TOKENS
        assert step["rank"] == 3
        assert step["tokens_per_second"] == pytest.approx(TOKENS / step["seconds"])
        assert not step["skipped"]
        assert 5 < step["loss"]["lm loss"] < 7  # ln 512 = 6.2
        assert step["grad_norm"] > 0
        assert 0 < step["learning_rate"] <= 1e-3


def test_the_job_is_framed(first_run):
    _, events = first_run
    assert [events[0]["event"], events[-1]["event"]] == ["run_start", "run_end"]
    start = events[0]
    expected = {"world_size": 4, "tp": 1, "pp": 2, "ep": 2, "dp": 2, "device": "cpu"}
    assert {name: start[name] for name in expected} == expected
    assert (start["num_experts"], start["layers"]) == (EXPERTS, LAYERS)
    assert start["args"]["moe_router_topk"] == TOPK
    assert len(start["patch_digest"]) == 64
    assert len(of_kind(events, "run_start")) == len(of_kind(events, "run_end")) == 1
    assert events[-1]["exit"] == 0


def test_expert_loads_count_every_training_token_and_no_other(first_run):
    """Two evaluations ran in between; layers of both pipeline stages are there."""
    _, events = first_run
    check_loads(events, {2: 2, 4: 2})
    writers = {event["layer"]: event["rank"] for event in of_kind(events, "expert_load")}
    assert writers == {1: 1, 2: 1, 3: 3, 4: 3}


def test_a_checkpoint_is_two_events(first_run):
    folder, events = first_run
    (start,) = of_kind(events, "checkpoint_save_start")
    (saved,) = of_kind(events, "checkpoint_saved")
    path = str(folder / "iter_0000005")
    assert (start["path"], start["asynchronous"], start["step"]) == (path, False, 5)
    assert (saved["path"], saved["asynchronous"], saved["step"]) == (path, False, 5)
    assert 0 < saved["stall_seconds"] <= saved["seconds"]
    assert (folder / "iter_0000005" / "metadata.json").exists()


def test_summary(first_run):
    folder, events = first_run
    summary = json.loads((folder / "summary.json").read_text())
    losses = {str(e["step"]): e["loss"]["lm loss"] for e in of_kind(events, "step")}
    assert summary["losses"] == losses
    assert (summary["steps"], summary["last_step"]) == (5, 5)
    assert summary["tokens"] == 5 * TOKENS
    assert summary["exit"] == 0
    assert len(summary["checkpoints"]) == 1


def test_tensorboard_has_the_imbalance(first_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, events = first_run
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    found = loads(events)
    for layer in (3, 4):  # the stage of the rank that has the writer
        scalars = accumulator.Scalars(f"moe/load_imbalance_layer_{layer}")
        expected = {
            step: max(t) * EXPERTS / sum(t) for (n, step), (t, _) in found.items() if n == layer
        }
        assert {s.step: s.value for s in scalars} == pytest.approx(expected, rel=1e-6)
    assert "lm loss" in accumulator.Tags()["scalars"]


def test_a_resumed_run_goes_on_where_it_stood(pool, first_run):
    """The first window after step 5 is one step long, not the two of the interval."""
    folder, _ = first_run
    changes = {"load": folder, "train-iters": 8, "override-opt-param-scheduler": True}
    events = train(pool, folder, **changes)
    assert [event["step"] for event in of_kind(events, "step")] == [6, 7, 8]
    (loaded,) = of_kind(events, "checkpoint_loaded")
    assert (loaded["path"], loaded["step"]) == (str(folder / "iter_0000005"), 5)
    assert loaded["seconds"] > 0
    check_loads(events, {6: 1, 8: 2})
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["last_step"], len(summary["segments"])) == (8, 8, 2)
    assert (summary["lost_steps"], summary["exit"]) == (0, 0)


def test_recomputed_layers_count_once(pool, tmp_path):
    plain = train(pool, tmp_path / "plain", **{"train-iters": 4})
    full = {
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
    recomputed = train(pool, tmp_path / "recomputed", **{"train-iters": 4} | full)
    check_loads(plain, {2: 2, 4: 2})
    assert loads(recomputed) == loads(plain)


def test_an_asynchronous_checkpoint_is_saved_later(pool, tmp_path):
    changes = {"save": tmp_path, "save-interval": 2, "train-iters": 6, "async-save": True}
    events = train(pool, tmp_path, **changes)
    starts, ends = (of_kind(events, f"checkpoint_save{end}") for end in ("_start", "d"))
    assert [event["path"][-7:] for event in starts] == ["0000002", "0000004", "0000006"]
    assert [event["path"] for event in ends] == [event["path"] for event in starts]
    assert all(event["asynchronous"] for event in (*starts, *ends))
    assert all(0 < event["stall_seconds"] <= event["seconds"] for event in ends)
    assert events[-1]["event"] == "run_end"


def test_microbatches_virtual_stages_and_tensor_parallelism(pool, tmp_path):
    """Parts of a layer's tokens are counted on different ranks and in different microbatches."""
    tensor = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 1}
    events = train(pool, tmp_path / "tp", **tensor, **{"sequence-parallel": True, "train-iters": 2})
    check_loads(events, {2: 2})
    virtual = {"num-layers-per-virtual-pipeline-stage": 1, "train-iters": 2}
    check_loads(train(pool, tmp_path / "vpp", **virtual), {2: 2})


def test_layers_of_multi_token_prediction_are_numbered_after_the_model(pool, tmp_path):
    changes = {"mtp-num-layers": 1, "train-iters": 2, "pipeline-model-parallel-size": 1}
    check_loads(train(pool, tmp_path, **changes), {2: 2}, layers=LAYERS + 1)


def test_no_loads_unless_asked_for(pool, tmp_path):
    events = train(pool, tmp_path, **{"resilient-expert-load-interval": 0, "train-iters": 2})
    assert not of_kind(events, "expert_load")
    assert len(of_kind(events, "step")) == 2
