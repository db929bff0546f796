"""`megatron-resilient checkpoint ls|verify|gc|diff`: documents, tables, exit statuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilient import cli
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.lock import RunLock
from tests.support.checkpoints import file_of, save, series


def run(*arguments: object) -> int:
    return cli.main(["checkpoint", *map(str, arguments)])


def document(capsys, *arguments: object) -> dict:
    run(*arguments, "--json")
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def harm(directory: Path, manifest, expert) -> str:
    path = directory / file_of(manifest, expert).path
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    return file_of(manifest, expert).path


def test_verify_of_what_is_whole(tmp_path, capsys):
    series(tmp_path, steps=3)
    assert run("verify", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path),
        "usable_step": 30,
        "steps": [
            {"step": 30, "complete": True, "damaged": [], "experts": 8, "stale_experts": 4},
            {"step": 20, "complete": True, "damaged": [], "experts": 8, "stale_experts": 4},
            {"step": 10, "complete": True, "damaged": [], "experts": 8, "stale_experts": 0},
        ],
    }
    assert run("verify", tmp_path) == 0
    assert "a restore loads step 30" in capsys.readouterr().out


def test_verify_of_what_is_damaged(tmp_path, capsys):
    _, second, third = series(tmp_path, steps=3)
    expert, dense = harm(tmp_path, second, (2, 1)), harm(tmp_path, third, None)
    places.manifest_path(tmp_path, 10).write_bytes(b"{")
    assert run("verify", tmp_path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    why = "its SHA-256 is not that of the manifest: bytes changed"
    bad_expert = {"file": expert, "layer": 2, "expert": 1, "why": why}
    bad_dense = {"file": dense, "layer": None, "expert": None, "why": why}
    assert found["usable_step"] is None
    assert [each["damaged"] for each in found["steps"][:2]] == [
        [bad_dense, bad_expert],
        [bad_expert],
    ]
    assert [each["complete"] for each in found["steps"]] == [False] * 3
    unreadable = found["steps"][2]
    assert (unreadable["experts"], unreadable["stale_experts"]) == (0, 0)
    (manifest,) = unreadable["damaged"]
    assert manifest["file"] == "manifests/step_00000010.json"
    assert manifest["why"].startswith("is no manifest of ours")
    assert run("verify", tmp_path) == 1
    shown = capsys.readouterr().out
    assert f"{expert} (layer 2, expert 1) {why}" in shown
    assert "nothing can be restored" in shown


def test_verify_says_what_a_restore_would_load(tmp_path, capsys):
    """A damaged expert of a partial checkpoint is replaced, and the step is usable."""
    third = series(tmp_path, steps=3)[-1]
    harm(tmp_path, third, (2, 2))
    found = document(capsys, "verify", tmp_path)
    assert found["usable_step"] == 30
    assert [each["complete"] for each in found["steps"]] == [False, True, True]
    assert run("verify", tmp_path, "--quick") == 0


def test_an_empty_directory_has_nothing_to_restore(tmp_path, capsys):
    places.prepare(tmp_path)
    assert run("verify", tmp_path, "--json") == 1
    expected = {"directory": str(tmp_path), "usable_step": None, "steps": []}
    assert json.loads(capsys.readouterr().out) == expected
    assert document(capsys, "ls", tmp_path)["steps"] == []
    assert run("ls", tmp_path) == 0
    assert "no checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["ls", "verify", "gc", "diff"])
def test_a_folder_that_is_not_ours_is_wrong_usage(tmp_path, capsys, action):
    assert run(action, tmp_path) == 2
    assert run(action, tmp_path / "nowhere") == 2
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert first.startswith(
        f"megatron-resilient checkpoint: {tmp_path}: is no checkpoint directory"
    )
    assert "nowhere: is no checkpoint directory" in second
    assert not list(tmp_path.iterdir())


def test_ls(tmp_path, capsys):
    made = series(tmp_path)
    places.manifest_path(tmp_path, 20).write_bytes(b"{")
    found = document(capsys, "ls", tmp_path)
    assert found["held_by"] is None
    assert [each["step"] for each in found["steps"]] == [40, 30, 20, 10]
    newest = found["steps"][0]
    assert newest == {
        "step": 40,
        "readable": True,
        "run": "run",
        "written": 1_700_000_040.0,
        "exact": False,
        "experts": 8,
        "stale_experts": 4,
        "oldest_step": 30,
        "files": 10,
        "bytes": sum(file.bytes for file in made[-1].files),
        "new_files": 6,
        "new_bytes": sum(file.bytes for file in made[-1].files if file.step == 40),
    }
    assert found["steps"][2]["readable"] is False
    assert found["steps"][3]["exact"] is True
    with RunLock.begin(tmp_path, "run-7"):
        assert document(capsys, "ls", tmp_path)["held_by"]["run"] == "run-7"
        assert run("ls", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("step", "kind", "experts", "of", "it", "oldest", "size", "new", "written")
    ]
    assert lines[1].split()[:6] == ["40", "partial", "4", "of", "8", "30"]
    assert lines[3].split()[:2] == ["20", "unreadable"]
    assert lines[4].split()[:2] == ["10", "exact"]
    assert "held by run run-7" in lines[5]


def test_gc(tmp_path, capsys):
    series(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    planned = document(capsys, "gc", tmp_path, "--keep-last", 1, "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    gone = document(capsys, "gc", tmp_path, "--keep-last", 1)
    assert (planned.pop("dry_run"), gone.pop("dry_run")) == (True, False)
    assert planned == gone
    assert (gone["kept"], gone["manifests"], gone["notes"]) == ([40], [10, 20, 30], [])
    assert gone["bytes"] > 0
    assert not [path for path in gone["files"] if (tmp_path / path).exists()]
    assert run("gc", tmp_path) == 0
    assert capsys.readouterr().out == "kept: step 40\ngone: no checkpoint; 0 files, 0 B\n"
    assert run("verify", tmp_path) == 0


def test_gc_beside_a_run_says_what_stays(tmp_path, capsys):
    base = save(tmp_path, 10)
    save(tmp_path, 20, [(1, 0)], base)
    places.manifest_path(tmp_path, 20).unlink()
    with RunLock.begin(tmp_path, "run") as lock:
        assert run("gc", tmp_path) == 2
        assert "looks for what it can restore" in capsys.readouterr().err
        lock.ready()
        assert run("gc", tmp_path) == 0
    assert "data of step 20 stays: a run may be writing it" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--keep-last", "--keep-every"])
@pytest.mark.parametrize("value", ["0", "-3", "all"])
def test_gc_keeps_at_least_one(tmp_path, capsys, flag, value):
    with pytest.raises(SystemExit) as leaving:
        run("gc", tmp_path, flag, value)
    assert leaving.value.code == 2
    assert flag in capsys.readouterr().err


def test_diff(tmp_path, capsys):
    series(tmp_path / "a", steps=3)
    series(tmp_path / "b", steps=3)
    assert run("diff", tmp_path / "a", tmp_path / "b") == 0
    assert "no difference" in capsys.readouterr().out
    assert run("diff", tmp_path / "a", "--sizes", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"] == {"directory": str(tmp_path / "a"), "step": 20}
    assert found["second"] == {"directory": str(tmp_path / "a"), "step": 30}
    assert found["same"] is False
    assert {"layer": 1, "expert": 2, "first": 10, "second": 30} in found["versions"]
    assert {each["key"].split("/")[0] for each in found["values"]} == {"dense", "expert", "random"}
    assert run("diff", tmp_path / "a", "--step", 10, "--other-step", 10) == 0
    capsys.readouterr()
    quick = document(capsys, "diff", tmp_path / "a", tmp_path / "b", "--step", 10, "--quick")
    assert quick["values"] is None
    assert len(quick["versions"]) == 8
    assert run("diff", tmp_path / "a") == 1
    shown = capsys.readouterr().out
    assert "version: layer 1, expert 2: 10, 30" in shown
    assert "version: layer 1, expert 0" not in shown


def test_diff_needs_two(tmp_path, capsys):
    save(tmp_path, 10)
    assert run("diff", tmp_path) == 2
    assert "has 1 checkpoints: name a step" in capsys.readouterr().err
    assert run("diff", tmp_path, "--step", 11) == 2
    assert "step_00000011.json: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["ls", "verify", "gc", "diff"])
def test_no_action_imports_what_is_slow(tmp_path, action):
    series(tmp_path, steps=3)
    done = subprocess.run(
        [
            *(sys.executable, "-X", "importtime", "-m", "megatron_resilient.cli"),
            *("checkpoint", action, tmp_path, "--json"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if action == "diff" else 0)
    json.loads(done.stdout)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "megatron_resilient.checkpoint.manifest" in imported
    heavy = {"torch", "megatron", "scipy", "rich"} | ({"numpy"} if action != "diff" else set())
    assert not imported & heavy
