"""The demo itself, at its small size, and that it leaves no process behind."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from megatron_resilient.telemetry import EventLog, read_events

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiprocess


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.mark.slow
def test_demo_is_killed_resumes_exactly_and_reports(tmp_path):
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "demo.py", "--quick", "--dir", folder],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL to node2" in done.stdout
    assert "without node2: 3 nodes go on after" in done.stdout
    assert "with node2 again: 4 nodes go on after" in done.stdout
    assert "SIGKILL to 4 nodes" in done.stdout
    assert "same loss and gradient norm in every bit" in done.stdout
    assert "max / mean tokens per rank" in done.stdout
    assert (folder / "run" / "report.html").stat().st_size > 10_000

    events = read_events(folder / "run")
    kinds = [event["event"] for event in events]
    assert kinds.count("run_start") == 3
    assert kinds.count("run_end") == 2
    assert kinds.count("checkpoint_loaded") == 2
    assert " is damaged: that of step " in done.stdout
    steps = [event for event in events if event["event"] == "step"]
    assert steps[-1]["step"] == 64
    assert steps[-1]["loss"]["lm loss"] < 0.9 * steps[0]["loss"]["lm loss"]
    # Every 11 steps, and at the end. That after step 44 was done twice.
    validations = [event for event in events if event["event"] == "evaluation"]
    assert [event["step"] for event in validations] == [11, 22, 33, 44, 44, 55, 64]
    assert all(event["loss"]["lm loss"] < 8.5 for event in validations)


def test_demo_spares_a_folder_that_is_not_its_own(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "demo.py", "--dir", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"--dir {tmp_path}" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_killed_job_leaves_no_process(tools, tmp_path, monkeypatch):
    import training_job

    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "from megatron_resilient.telemetry import EventLog\n"
        f"log = EventLog({str(tmp_path)!r}, rank=int(os.environ['LOCAL_RANK']))\n"
        "log.emit('member_join', member=str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(training_job, "SCRIPT", script)
    with training_job.TrainingJob(2, [], tmp_path, tmp_path / "log") as job:
        pids = [int(event["member"]) for event in islice(job.follow(), 2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert job.exit_code is None
        assert job.kill() == 2
        assert job.kill() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_job_that_fails_says_so(tools, tmp_path, monkeypatch):
    import training_job

    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no such thing')")
    monkeypatch.setattr(training_job, "SCRIPT", script)
    with training_job.TrainingJob(1, [], tmp_path, tmp_path / "log") as job:
        assert list(job.follow()) == []
    assert job.exit_code not in (0, None)
    assert "no such thing" in (tmp_path / "log").read_text()


def run_of(folder, *jobs, lost_steps=0):
    """Writes a run whose jobs did the given steps: {step: loss}; a node was lost in the first."""
    with EventLog(folder, rank=0) as log:
        for job in jobs:
            log.emit("run_start", world_size=1)
            for step, loss in job.items():
                log.emit(
                    "step",
                    step,
                    loss={"lm loss": loss},
                    seconds=1.0,
                    tokens=8,
                    grad_norm=0.5,
                    learning_rate=0.1,
                )
            log.emit("evaluation", max(job), loss={"lm loss": loss})
            for cause in ("failure", "join") if job is jobs[0] else ():
                names = {"lost_nodes": [], "joined_nodes": [], "world_size": 1}
                log.emit(
                    "recovery",
                    min(job),
                    seconds={"detect": 0.1},
                    cause=cause,
                    source="memory",
                    lost_steps=lost_steps,
                    **names,
                )
            if job is jobs[-1]:
                lost = {"lost_expert_tokens": 5, "lost_share": 0.01}
                where = {"path": "c/step_00000002.json", "seconds": 1.0}
                log.emit(
                    "checkpoint_loaded", max(job), replaced_experts=[[1, 2, 2, 1]], **lost, **where
                )
            loads = {"tokens": [3, 1, 1, 1], "rank_tokens": [3, 3], "steps": 1}
            log.emit("expert_load", max(job), layer=1, **loads)
    return read_events(folder)


def test_result_compares_the_steps_that_were_done_twice(tools, tmp_path):
    from demo_result import Result

    third, almost = 1 / 3, 1 / 3 + 2**-54
    same = Result.of(run_of(tmp_path / "a", {1: 2.0, 2: 1.0, 3: third}, {2: 1.0, 3: third}))
    assert (same.repeated.steps, same.repeated.different) == ((2, 3), ())
    assert same.good
    assert str(same.balance) == "1.00 (without replicas, from the same routing: 1.33)"
    other = Result.of(run_of(tmp_path / "b", {1: 2.0, 2: 1.0, 3: third}, {2: 1.0, 3: almost}))
    assert other.repeated.different == (3,)
    assert not other.good
    assert "NO" in dict(other.rows())["resume exact"]
    costly = run_of(tmp_path / "e", {1: 2.0, 2: 1.0, 3: third}, {2: 1.0, 3: third}, lost_steps=1)
    assert not Result.of(costly).good
    never = Result.of(run_of(tmp_path / "c", {1: 2.0}, {2: 1.0}))
    assert not never.repeated.exact
    rising = Result.of(run_of(tmp_path / "d", {1: 1.0, 2: 3.0}, {2: 3.0}))
    assert rising.repeated.exact
    assert not rising.good
