"""`megatron-resilient checkpoint consolidate` without Megatron: refusals, and a folder for OUT."""

import argparse
import json
from enum import Enum

import pytest

from megatron_resilient import cli
from megatron_resilient.checkpoint.staged_folder import staged_folder
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore import given_flags
from megatron_resilient.mcore.checkpointing.consolidation_ranks import ranks_of
from tests.support.checkpoints import series


def refusal(capsys, *arguments) -> str:
    assert cli.main(["checkpoint", "consolidate", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def test_what_cannot_be_consolidated_is_said_before_anything_is_written(tmp_path, capsys):
    ours, out = tmp_path / "ours", tmp_path / "out"
    assert "is no checkpoint directory of ours" in refusal(capsys, tmp_path, out)
    series(ours, steps=2)
    assert "has no checkpoint of step 15; there are: 20, 10" in refusal(
        capsys, ours, out, "--step", 15
    )
    assert "the manifest of step 20 does not say the flags of its run" in refusal(capsys, ours, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_a_folder_appears_whole(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with staged_folder(out) as folder:
        (folder / "file").write_text("new")
        assert not any(out.iterdir())
        with pytest.raises(CheckpointError, match="another process writes it"), staged_folder(out):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
    with pytest.raises(CheckpointError, match="has something in it"), staged_folder(out):
        pass


def test_nothing_is_left_of_a_folder_that_failed(tmp_path):
    killed = tmp_path / ".out.consolidating" / "iter_0000001"
    killed.mkdir(parents=True)
    with pytest.raises(KeyError), staged_folder(tmp_path / "out") as folder:
        {}[any(folder.iterdir())]
    assert not any(tmp_path.iterdir())
    with (
        pytest.raises(CheckpointError, match="there is no folder"),
        staged_folder(tmp_path / "none" / "out"),
    ):
        pass


def test_flags_as_plain_values(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    color = Enum("Color", ["red"])
    args = argparse.Namespace(
        lr=1e-3,
        split=None,
        data=("a", (1, 2)),
        kind=color.red,
        call=print,
        rank=3,
        _own=1,
        inf=float("inf"),
    )
    found = given_flags.plain(args)
    # Manifests take no tuples, so JSON must give back the very same.
    assert found == json.loads(json.dumps(found))
    assert found == {
        "data": ["a", [1, 2]],
        "kind": "red",
        "lr": 1e-3,
        "world_size": 8,
    }


@pytest.mark.parametrize(
    ("tensor", "expert_tensor", "pipeline", "ranks"), [(1, 1, 1, 1), (2, 1, 2, 4), (1, 2, 1, 2)]
)
def test_processes_that_hold_a_model(tensor, expert_tensor, pipeline, ranks):
    model = {
        "tensor_model_parallel_size": tensor,
        "expert_tensor_parallel_size": expert_tensor,
        "pipeline_model_parallel_size": pipeline,
    }
    assert ranks_of(model) == ranks
