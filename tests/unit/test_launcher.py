"""Emulated nodes: forked after torch was imported, killed one by one, and back again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilient import cli
from megatron_resilient.commands import run as run_command
from megatron_resilient.elastic import launcher
from megatron_resilient.elastic.agent import Outcome
from tests.support.processes import gone, until

ROOT = Path(__file__).parents[2]
ENDS_WHEN_TOLD = """
import os, sys, time
import pathlib
folder = pathlib.Path(sys.argv[1])
(folder / (os.environ["MEGATRON_RESILIENT_NODE"] + "." + str(os.getpid()))).touch()
while not (folder / "end").exists():
    time.sleep(0.02)
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.fixture
def start(tmp_path):
    jobs = []

    def run(nodes, workers, *command, rejoin=""):
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.run_job"]
                + [str(one) for one in (nodes, workers, rejoin, *command)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        )
        return jobs[-1]

    yield run
    for job in jobs:
        job.kill()
        job.communicate()


@pytest.fixture
def waiting(tmp_path):
    """A script that waits for `tell()`."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WHEN_TOLD)
    return script


def read_started(job, count):
    """Returns {node: (agent, [workers])} after so many starts."""
    found = {}
    while count:
        line = job.stderr.readline()
        assert line, "the job has ended"
        if match := re.match(r"\[(\w+)\] agent (\d+) started workers (.*)", line):
            found[match[1]] = (int(match[2]), [int(pid) for pid in match[3].split()])
            count -= 1
    return found


def test_forked_workers_train_over_gloo(start, tmp_path):
    job = start(2, 2, ROOT / "tests" / "support" / "gloo_script.py", tmp_path / "rendezvous", 4)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    lines = re.findall(r"^\[node\d\.\d\] weights (.*) gloo_script.py __main__$", out, re.MULTILINE)
    assert len(lines) == 4
    assert len(set(lines)) == 1


def test_a_killed_node_takes_its_workers_along_and_comes_back(start, tmp_path, waiting):
    job = start(2, 2, waiting, tmp_path, rejoin=0.5)
    nodes = read_started(job, 2)
    assert set(nodes) == {"node0", "node1"}
    agent, workers = nodes["node1"]
    os.kill(agent, signal.SIGKILL)
    until(lambda: all(map(gone, workers)))
    back = read_started(job, 1)["node1"]
    assert back[0] != agent
    assert not any(map(gone, nodes["node0"][1]))
    (tmp_path / "end").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err


def test_without_rejoin_it_stays_away_and_the_others_decide(start, tmp_path, waiting):
    job = start(2, 1, waiting, tmp_path)
    nodes = read_started(job, 2)
    os.kill(nodes["node0"][0], signal.SIGKILL)
    (tmp_path / "end").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "[node0] agent was ended by signal 9\n" in err


def test_no_process_outlives_a_killed_launcher(start, tmp_path, waiting):
    job = start(2, 1, waiting, tmp_path)
    nodes = read_started(job, 2)
    job.kill()
    pids = [pid for agent, workers in nodes.values() for pid in (agent, *workers)]
    until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_nodes(start, tmp_path, waiting, number):
    job = start(2, 1, waiting, tmp_path)
    nodes = read_started(job, 2)
    job.send_signal(number)
    job.communicate(timeout=60)
    # Nobody hands over here, so after the leave timeout the workers were killed.
    assert job.returncode == (130 if number == signal.SIGINT else 1)
    assert all(gone(pid) for _, workers in nodes.values() for pid in workers)


def test_an_error_of_all_nodes_is_told_once(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\n"
        "print('script.py: ConfigError: --lr is missing', file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    job = start(3, 1, script)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err.count("ConfigError: --lr is missing") == 1
    assert "megatron-resilient run: ConfigError: --lr is missing\n" in err


def test_a_traceback_of_a_forked_worker_is_shown(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def train():\n    1 / 0\n\ntrain()\n")
    job = start(1, 1, script)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "[node0.0] ZeroDivisionError: division by zero\n" in err


# The command line.


@pytest.fixture
def parsed(monkeypatch):
    """Runs the command with everything that starts processes replaced."""
    seen = {}

    def agent(settings, body):
        seen.update(settings=settings)
        return Outcome(0, "finished")

    def job(settings, body, preload=None):
        seen.update(job=settings, preload=preload)
        return 0

    monkeypatch.setattr(launcher, "run_agent", agent)
    monkeypatch.setattr(launcher, "run_job", job)
    monkeypatch.setattr(
        launcher, "exec_body", lambda command: seen.update(command=command, way="exec")
    )
    monkeypatch.setattr(
        launcher, "fork_body", lambda command: seen.update(command=command, way="fork")
    )
    monkeypatch.setattr(run_command, "_keep_to_the_cpu", lambda: None)

    def run(*arguments):
        assert cli.main(["run", *arguments]) == 0
        return seen

    return run


SCRIPT = str(ROOT / "examples" / "pretrain_moe.py")


def test_one_node_of_many(parsed, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    seen = parsed(
        *("--nnodes", "2:8", "--nproc-per-node", "4", "--coordinator", "head:29400"),
        *("--token-file", str(token), "--node-id", "node5", "--heartbeat-timeout", "9"),
        *(SCRIPT, "--nnodes", "3", "--lr", "1"),
    )
    settings = seen["settings"]
    assert (settings.host, settings.port, settings.token) == ("head", 29400, b"secret")
    assert (settings.node, settings.workers, settings.min_nodes) == ("node5", 4, 2)
    assert settings.limits.heartbeat_timeout == 9
    assert (seen["way"], seen["command"]) == ("exec", [SCRIPT, "--nnodes", "3", "--lr", "1"])


def test_a_job_of_this_machine_has_its_own_coordinator(parsed):
    seen = parsed("--nproc-per-node", "2", SCRIPT)
    (node,) = seen["job"].nodes
    command = seen["job"].coordinator
    assert (node.host, node.workers) == ("127.0.0.1", 2)
    assert len(node.token) == 64
    assert command[command.index("--port") + 1] == str(node.port)
    assert command[command.index("--nnodes") + 1] == "1:1"
    assert not any("secret" in part or node.token.decode() in part for part in command)
    assert seen["preload"] is None


def test_emulated_nodes_are_forked(parsed):
    seen = parsed("--emulate-nodes", "3", "--rejoin-after", "2", SCRIPT)
    assert [node.node for node in seen["job"].nodes] == ["node0", "node1", "node2"]
    command = seen["job"].coordinator
    assert command[command.index("--nnodes") + 1] == "1:3"
    assert seen["job"].rejoin_after == 2
    assert seen["way"] == "fork"
    assert seen["preload"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script"),
        (["--coordinator", "head", SCRIPT], "is not HOST:PORT"),
        (["--coordinator", "head:1", "--token-file", "/none", SCRIPT], "token file /none"),
        (["--coordinator", "head:1", "--rejoin-after", "1", SCRIPT], "--rejoin-after"),
        (["--emulate-nodes", "0", SCRIPT], "--emulate-nodes"),
        (["--nproc-per-node", "0", SCRIPT], "--nproc-per-node 0"),
        (["--heartbeat-timeout", "1", SCRIPT], "--heartbeat-timeout 1"),
    ],
)
def test_wrong_usage(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(run_command, "_keep_to_the_cpu", lambda: None)
    assert cli.main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("megatron-resilient run: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("nodes", ["0", "3:2", "x"])
def test_wrong_node_ranges(nodes, capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--nnodes", nodes, SCRIPT])
    assert "--nnodes" in capsys.readouterr().err
