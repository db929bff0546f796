"""Agents in processes of their own, with workers that do one thing each."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_resilient import error_report
from megatron_resilient.elastic.agent import AgentSettings
from megatron_resilient.elastic.messages import Beat, Hello, Leave, Stop, WorkerExit
from megatron_resilient.elastic.node_id import default_node_id
from megatron_resilient.errors import ConfigError
from tests.support.fake_coordinator import PATIENCE_SECONDS, FakeCoordinator
from tests.support.processes import gone, until

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"
WAYS = pytest.mark.parametrize("way", ["exec", "fork"])


@pytest.fixture
def coordinator():
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def start(coordinator):
    agents = []

    def run(code, way="fork", workers=2, restarts=0, log_dir=""):
        arguments = [coordinator.port, way, workers, restarts, log_dir, code]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.run_agent", *map(str, arguments)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return agents[-1]

    yield run
    for agent in agents:
        agent.kill()
        agent.communicate()


def end(agent):
    """Returns (outcome, stdout, stderr) of an agent."""
    out, err = agent.communicate(timeout=PATIENCE_SECONDS)
    assert agent.returncode == 0, err
    return re.search(r"^outcome: (.*)$", out, re.MULTILINE)[1], out, err


def started(agent):
    """Waits for workers and returns their pids."""
    for line in agent.stderr:
        if "started workers" in line:
            return [int(pid) for pid in line.rpartition("workers ")[2].split()]
    raise AssertionError("the agent has ended")


@WAYS
def test_workers_know_their_place_and_are_reported(coordinator, start, way):
    code = (
        "import os, sys\n"
        "print(os.environ['MEGATRON_RESILIENT_NODE'], os.environ['LOCAL_WORLD_SIZE'])\n"
        "print('partial', end='')\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    outcome, out, err = end(start(code, way))
    assert outcome == "0 finished"
    for rank in range(2):
        assert f"[node7.{rank}] node7 2\n" in out
        assert f"[node7.{rank}] partial\n" in out
        assert f"[node7.{rank}] to stderr\n" in err
        assert coordinator.wait_for(WorkerExit, local_rank=rank).status == 0
    hello = coordinator.hellos[0]
    assert (hello.role, hello.node, hello.local_world) == ("agent", "node7", 2)


@WAYS
def test_no_worker_outlives_a_killed_agent(coordinator, start, way):
    agent = start(SLEEP, way)
    pids = started(agent)
    coordinator.wait_for(Hello)
    assert not any(map(gone, pids))
    agent.kill()
    until(lambda: all(map(gone, pids)))


def test_one_lost_worker_is_a_lost_node(coordinator, start):
    agent = start(SLEEP)
    pids = started(agent)
    coordinator.wait_for(Hello)
    os.kill(pids[0], signal.SIGKILL)
    outcome, _, err = end(agent)
    assert outcome == "1 failed"
    assert "worker 0 was ended by signal 9" in err
    assert coordinator.wait_for(WorkerExit, local_rank=0).status == -9
    assert coordinator.wait_for(WorkerExit, local_rank=1).pid == pids[1]
    assert all(map(gone, pids))


def test_a_stopped_worker_is_killed_as_well(coordinator, start):
    agent = start(SLEEP)
    pids = started(agent)
    coordinator.wait_for(Hello)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    end(agent)
    assert all(map(gone, pids))


def test_what_a_worker_started_dies_with_it(coordinator, start):
    code = (
        "import subprocess, time, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    agent = start(code, workers=1)
    pids = started(agent)
    child = int(agent.stdout.readline().rpartition(" ")[2])
    os.kill(pids[0], signal.SIGKILL)
    end(agent)
    until(lambda: gone(child))


def test_workers_that_failed_start_again_as_often_as_allowed(coordinator, start):
    outcome, _, err = end(start("import sys; sys.exit(5)", workers=1, restarts=1))
    assert outcome == "1 failed"
    assert err.count("started workers") == 2
    assert "gives up: worker 0 exited with 5" in err


@pytest.mark.parametrize(
    ("status", "outcome"), [(error_report.WRONG_USAGE, 2), (error_report.JOB_IS_OVER, 1)]
)
def test_what_cannot_help_is_not_tried_again(coordinator, start, status, outcome):
    told, _, err = end(start(f"import sys; sys.exit({status})", restarts=3))
    assert told == f"{outcome} failed"
    assert err.count("started workers") == 1


ERROR = (
    "import os, sys, time\n"
    "rank = os.environ['LOCAL_RANK']\n"
    "time.sleep(0.2 * int(rank))\n"
    "print(f'pretrain.py: rank {rank}: PlanError: too few slots', file=sys.stderr)\n"
    "sys.exit(1)\n"
)


@pytest.mark.parametrize("logged", [False, True])
def test_an_error_of_ours_is_told_once(coordinator, start, tmp_path, logged):
    outcome, out, err = end(start(ERROR, log_dir=tmp_path if logged else ""))
    assert outcome == "1 failed"
    assert out.count("named: PlanError: too few slots\n") == 1
    assert "PlanError" not in err


def test_output_in_files(coordinator, start, tmp_path):
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    _, out, err = end(start(code, log_dir=tmp_path))
    assert "[node7.0] out" not in out + err
    assert (tmp_path / "node7" / "0.stdout.log").read_text() == "out\n"
    assert (tmp_path / "node7" / "1.stderr.log").read_text() == "err\n"


def test_sigterm_is_a_planned_leave(coordinator, start):
    agent = start("import sys, time\nfor line in open('/proc/self/stat'): time.sleep(2)")
    started(agent)
    coordinator.wait_for(Hello)
    agent.send_signal(signal.SIGTERM)
    coordinator.wait_for(Leave)
    outcome, _, _ = end(agent)  # the workers end by themselves, as those do that are told to
    assert outcome == "0 left"


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)],
)
def test_impatience_kills(coordinator, start, signals, code):
    agent = start(SLEEP)
    pids = started(agent)
    coordinator.wait_for(Hello)
    for number in signals:
        agent.send_signal(number)
        time.sleep(0.1)
    assert end(agent)[0] == f"{code} failed"
    assert all(map(gone, pids))


def test_a_leave_and_exits_are_said_again_to_a_coordinator_that_returns(coordinator, start):
    agent = start(SLEEP)
    started(agent)
    coordinator.wait_for(Hello)
    agent.send_signal(signal.SIGTERM)
    coordinator.wait_for(Leave)
    coordinator.drop_all()
    coordinator.wait_for(Leave, count=2)
    coordinator.wait_for(Beat)


def test_a_stop_order_ends_workers_and_agent(coordinator, start):
    agent = start("import time; time.sleep(0.5)")
    started(agent)
    coordinator.wait_for(Hello)
    coordinator.send(Stop(1))
    assert end(agent)[0] == "1 failed"


def test_a_refusal_is_told_and_leaves_no_worker(start, coordinator, monkeypatch):
    monkeypatch.setattr("tests.support.fake_coordinator.TOKEN", b"another job's")
    agent = start(SLEEP)
    pids = started(agent)
    outcome, out, _ = end(agent)
    assert outcome == "1 failed"
    assert "named: RefusedError: " in out
    assert all(map(gone, pids))


def test_the_agents_path_imports_no_torch():
    code = (
        "import sys\n"
        "import megatron_resilient.elastic.agent, megatron_resilient.elastic.launcher\n"
        "import megatron_resilient.elastic.node_id, megatron_resilient.commands.run\n"
        "print(sorted({'torch', 'megatron', 'numpy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("changes", [{"workers": 0}, {"max_restarts": -1}])
def test_settings_that_cannot_work(changes):
    values = {"node": "n", "host": "h", "port": 1, "token": b"", "workers": 1}
    with pytest.raises(ConfigError, match="--"):
        AgentSettings(**(values | changes))


def test_node_ids():
    assert default_node_id({"SLURM_NODEID": "3"}) == "node3"
    assert re.fullmatch(r"[A-Za-z0-9._:@-]+", default_node_id({}))
