import json
import math
from pathlib import Path

import pytest

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry import EventLog, RunSummary, atomic, write_summary


class Run:
    """A run written by hand; a second passes with each event."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.seconds = 0
        self.log = EventLog(run_dir, rank=0, clock=self.tick)

    def tick(self):
        self.seconds += 1
        return float(self.seconds)

    def start(self, **fields):
        self.log.generation = 0
        self.log.emit("run_start", world_size=4, **fields)

    def steps(self, first, last, offset=0.0, seconds=0.5, tokens=100):
        for step in range(first, last + 1):
            self.log.emit(
                "step", step, loss={"lm loss": offset + step}, seconds=seconds, tokens=tokens
            )

    def recover(self, step, **fields):
        self.log.generation += 1
        self.log.emit("recovery", step, seconds={"detect": 0.25, "rebuild": 1.5}, **fields)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.log.close()


def test_a_run_that_was_stopped_and_resumed(run):
    run.start()
    run.steps(1, 5)
    run.log.emit(
        "checkpoint_saved", 3, path="c/3", seconds=4.0, stall_seconds=0.5, bytes=10, note="x"
    )
    run.log.emit("error", message="no space", type="OSError")
    run.start()
    run.log.emit("checkpoint_loaded", 3, path="c/3", lost_expert_tokens=7)
    run.steps(4, 6, offset=10)
    run.log.emit("run_end", exit=0)

    summary = write_summary(run.run_dir).to_json()

    assert json.loads((run.run_dir / "summary.json").read_text()) == summary
    assert [path.name for path in sorted(run.run_dir.iterdir())] == [
        "events.jsonl",
        "summary.json",
    ]
    assert summary["losses"] == {"1": 1, "2": 2, "3": 3, "4": 14, "5": 15, "6": 16}
    assert (summary["steps"], summary["last_step"], summary["tokens"]) == (6, 6, 600)
    assert (summary["lost_steps"], summary["lost_tokens"]) == (2, 200)
    assert summary["lost_expert_tokens"] == 7
    assert summary["tokens_per_second"] == 200
    assert summary["recoveries"] == []
    assert summary["exit"] == 0
    (checkpoint,) = summary["checkpoints"]
    assert checkpoint["note"] == "x"
    assert (checkpoint["step"], checkpoint["stall_seconds"]) == (3, 0.5)
    assert [error["message"] for error in summary["errors"]] == ["no space"]
    assert summary["segments"] == [
        {
            "start_time": 1,
            "end_time": 8,
            "world_size": 4,
            "first_step": 1,
            "last_step": 5,
            "exit": None,
        },
        {
            "start_time": 9,
            "end_time": 14,
            "world_size": 4,
            "first_step": 4,
            "last_step": 6,
            "exit": 0,
        },
    ]


def test_a_recovery_from_memory_loses_nothing(run):
    run.start()
    run.steps(1, 4)
    run.log.emit("failure", 5, failed_ranks=[3])
    run.recover(5, world_size=3)
    run.steps(5, 8)
    summary = write_summary(run.run_dir)
    assert (summary.lost_steps, summary.lost_tokens, summary.failures) == (0, 0, 1)
    (recovery,) = summary.recoveries
    assert recovery["total_seconds"] == 1.75
    assert (recovery["step"], recovery["generation"], recovery["world_size"]) == (5, 1, 3)
    assert summary.exit is None


def test_a_recovery_that_rolls_back(run):
    run.start()
    run.steps(1, 9)
    run.recover(6, lost_expert_tokens=11)
    run.steps(6, 7, offset=100)
    summary = write_summary(run.run_dir)
    assert (summary.lost_steps, summary.lost_tokens, summary.lost_expert_tokens) == (4, 400, 11)
    # Steps 8 and 9 were rolled back and are not done yet.
    assert summary.losses == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 106, 7: 107}
    assert summary.last_step == 7


def test_steps_lost_twice_count_twice(run):
    run.start()
    run.steps(1, 4)
    run.start()
    run.steps(3, 4, offset=10)
    run.start()
    run.steps(4, 4, offset=20)
    summary = write_summary(run.run_dir)
    assert summary.losses == {1: 1, 2: 2, 3: 13, 4: 24}
    assert (summary.lost_steps, summary.lost_tokens) == (3, 300)


def test_a_writer_of_a_generation_that_is_over_changes_nothing(run):
    run.start()
    run.steps(1, 2)
    run.recover(3)
    run.steps(3, 3)
    run.log.generation = 0
    run.steps(3, 3, offset=50)
    summary = write_summary(run.run_dir)
    assert summary.losses == {1: 1, 2: 2, 3: 3}
    assert summary.lost_steps == 0


def test_a_step_written_twice_in_one_generation_is_not_lost(run):
    run.start()
    run.steps(1, 2)
    run.steps(2, 2, offset=5)
    summary = write_summary(run.run_dir)
    assert summary.losses == {1: 1, 2: 7}
    assert (summary.lost_steps, summary.tokens) == (0, 200)


def test_throughput_leaves_out_the_first_steps_of_each_job(run):
    run.start()
    run.steps(1, 3, seconds=10.0)
    run.steps(4, 5, seconds=1.0)
    run.start()
    run.steps(6, 8, seconds=10.0)
    run.steps(9, 9, seconds=0.25)
    assert write_summary(run.run_dir).tokens_per_second == 100  # of 100, 100, 400


def test_throughput_of_a_short_run(run):
    run.start()
    assert write_summary(run.run_dir).tokens_per_second is None
    run.steps(1, 1, seconds=0.0)
    assert write_summary(run.run_dir).tokens_per_second is None
    run.steps(2, 2, seconds=4.0)
    assert write_summary(run.run_dir).tokens_per_second == 25
    run.log.emit("step", 3, loss={}, seconds=1.0, tokens=1, tokens_per_second=75.0)
    assert write_summary(run.run_dir).tokens_per_second == 50


def test_losses_by_name(run):
    run.start()
    step = {"seconds": 1.0, "tokens": 1}
    run.log.emit("step", 1, loss={"z": 0.5, "lm loss": math.nan}, **step)
    run.log.emit("step", 2, loss={"mse": 3.0, "z": 0.25}, **step)
    summary = write_summary(run.run_dir).to_json()
    assert summary["losses"] == {"1": "nan", "2": 3.0}
    assert summary["auxiliary_losses"] == {"z": {"1": 0.5, "2": 0.25}}


def test_an_end_without_a_start(run):
    run.log.emit("run_end", exit="signal")
    assert write_summary(run.run_dir).exit == "signal"


def test_no_events():
    summary = RunSummary.from_events([])
    assert (summary.losses, summary.steps, summary.last_step, summary.exit) == ({}, 0, None, None)


def test_an_old_summary_survives_what_goes_wrong(run, monkeypatch):
    run.start()
    write_summary(run.run_dir)
    old = (run.run_dir / "summary.json").read_bytes()

    def fail(descriptor):
        raise OSError("no space left")

    run.steps(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            write_summary(run.run_dir)
    with Path(run.log.path).open("ab") as file:
        file.write(b"damage\n")
    with pytest.raises(TelemetryError, match=r"events\.jsonl:3"):
        write_summary(run.run_dir)
    assert (run.run_dir / "summary.json").read_bytes() == old
    assert len(list(run.run_dir.iterdir())) == 2


@pytest.mark.parametrize(("last_told", "loss"), [(5, 5), (4, 5.5)], ids=["again", "late"])
def test_a_step_that_committed_before_a_failure_is_told_and_not_lost(run, last_told, loss):
    run.start()
    run.steps(1, last_told)
    run.recover(5)
    run.log.emit("step", 5, loss={"lm loss": 5.5}, seconds=0.5, tokens=100, replayed=True)
    run.steps(6, 6)
    summary = write_summary(run.run_dir)
    assert (summary.steps, summary.lost_steps, summary.losses[5]) == (6, 0, loss)
