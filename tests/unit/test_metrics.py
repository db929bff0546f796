"""What Prometheus is told of a run."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry import EventLog
from megatron_resilient.telemetry.metrics import PREFIX, RunMetrics
from megatron_resilient.telemetry.tail import EventTail

PROGRAM = [sys.executable, "-m", "megatron_resilient.cli"]
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"


def write_run(folder):
    log = EventLog(folder, rank=3)
    log.emit("run_start", step=None, world_size=4)
    for step in (1, 2):
        log.emit("step", step=step, loss={"lm loss": 8.0 - step}, seconds=0.5, tokens=1000)
    log.emit("expert_load", step=2, layer=1, tokens=[30, 10], steps=2, rank_tokens=[20, 20])
    log.emit("failure", step=2, failed_nodes=["node2"])
    log.emit(
        "recovery",
        step=3,
        seconds={"detect": 0.5, "refill": 1.0},
        world_size=3,
        source="memory",
        lost_steps=0,
    )
    log.emit("step", step=3, loss={"lm loss": float("nan")}, seconds=0.25, tokens=1000)
    path = "save/manifests/step_00000003.json"
    log.emit("checkpoint_saved", step=5, path=path, seconds=2.0, stall_seconds=0.01, bytes=500)
    log.emit("checkpoint_failed", step=3, path=path, why="rank 1: disk full")
    return log


def told(metrics):
    return {
        (metric.name, label): value for metric in metrics for label, value in metric.values.items()
    }


def test_numbers_follow_the_events(tmp_path):
    write_run(tmp_path).close()
    metrics = RunMetrics()
    assert told(metrics) == {}
    for event in EventTail(tmp_path).new_events():
        metrics.take(event)
    found = told(metrics)
    assert found["step", ""] == 3
    assert found["loss", "lm loss"] != found["loss", "lm loss"]  # not a number
    assert found["tokens_per_second", ""] == 4000
    assert (found["tokens_total", ""], found["steps_total", ""]) == (3000, 3)
    assert found["world_size", ""] == 3
    assert found["expert_load_imbalance", "1"] == 1.5
    assert found["rank_load_imbalance", "1"] == 1
    assert found["failures_total", ""] == 1
    assert found["recoveries_total", "memory"] == 1
    assert found["recovery_seconds", "refill"] == 1.0
    assert found["recovery_seconds_total", ""] == 1.5
    assert found["lost_steps_total", ""] == 0
    assert (found["checkpoint_step", ""], found["checkpoint_bytes_total", ""]) == (3, 500)
    assert found["checkpoints_failed_total", ""] == 1
    assert ("errors_total", "") not in found


def test_a_tail_gives_each_event_once_and_no_half_a_line(tmp_path):
    tail = EventTail(tmp_path)
    assert tail.new_events() == []  # the run has not started
    log = EventLog(tmp_path, rank=0)
    log.emit("run_start", step=None, world_size=1)
    assert [event["event"] for event in tail.new_events()] == ["run_start"]
    assert tail.new_events() == []
    events = tmp_path / "events.jsonl"
    line = json.dumps({"time": 1.0, "event": "failure", "step": 1, "generation": 0, "rank": None})
    with events.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert tail.new_events() == []
        file.write(line[20:] + "\n")
    assert [event["event"] for event in tail.new_events()] == ["failure"]


def test_a_damaged_line_is_named_once(tmp_path):
    tail = EventTail(tmp_path)
    (tmp_path / "events.jsonl").write_text("no event\n")
    with pytest.raises(TelemetryError, match=r"events\.jsonl:1: not a JSON object"):
        tail.new_events()
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", step=None, world_size=1)
    assert [event["event"] for event in tail.new_events()] == ["run_start"]


def test_prometheus_gets_them_over_http_while_the_run_goes_on(tmp_path):
    log = write_run(tmp_path)
    command = [*PROGRAM, "metrics", str(tmp_path), "--port", "0", "--host", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://\S+/", process.stdout.readline())[0]

            def scrape():
                with urllib.request.urlopen(f"{address}metrics", timeout=10) as answer:
                    families = list(text_string_to_metric_families(answer.read().decode()))
                return {
                    (sample.name, *sample.labels.values()): sample.value
                    for family in families
                    for sample in family.samples
                }

            first = scrape()
            assert first[f"{PREFIX}step",] == 3
            assert first[f"{PREFIX}recoveries_total", "memory"] == 1
            log.emit("step", step=4, loss={"lm loss": 3.5}, seconds=0.5, tokens=1000)
            second = scrape()
            assert second[f"{PREFIX}step",] == 4
            assert second[f"{PREFIX}loss", "lm loss"] == 3.5
            assert second[f"{PREFIX}tokens_total",] == 4000
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "nowhere: no such directory; give the directory of a run"),
        ([".", "--port", "70000"], "--port 70000: must be from 0 to 65535"),
        ([".", "--host", "192.0.2.1"], "--host 192.0.2.1 --port 9400: cannot listen there: "),
    ],
)
def test_bad_input_is_named(tmp_path, arguments, error):
    done = subprocess.run(
        [*PROGRAM, "metrics", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads(DASHBOARD.read_text())
    known = set(RunMetrics()._metrics)
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(rf"{PREFIX}(\w+)", target["expr"])
    }
    assert asked <= known
    assert len(asked) > 15
