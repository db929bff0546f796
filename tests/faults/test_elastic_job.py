"""Whole jobs with a real coordinator, agents and gloo, whose nodes are killed, stopped or leave.

The training is one number that grows: what is tested is who takes part, and that nobody hangs. Most
of it is tested with Megatron beside this.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.processes import gone, until

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(180),
]


class Job:
    """A running job, and all that it has printed."""

    def __init__(self, nodes, steps, seconds=0.1, rejoin=""):
        script = ROOT / "tests" / "support" / "elastic_script.py"
        arguments = [str(one) for one in (nodes, rejoin, script, steps, seconds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.run_elastic_job", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern, count=1, seconds=60):
        """Returns the match of the count-th line that fits."""
        deadline = time.monotonic() + seconds
        while True:
            found = [match for line in list(self.lines) if (match := re.search(pattern, line))]
            if len(found) >= count:
                return found[count - 1]
            assert time.monotonic() < deadline, "\n".join([pattern, *self.lines])
            assert self.process.poll() is None or self._reader.is_alive(), "\n".join(self.lines)
            time.sleep(0.02)

    def pids(self, node, count=1):
        """Returns (agent, worker) of a node's count-th start."""
        match = self.wait_for(rf"\[{node}\] agent (\d+) started workers (\d+)", count)
        return int(match[1]), int(match[2])

    def end(self):
        code = self.process.wait(timeout=100)
        self._reader.join(10)
        return code

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()


@pytest.fixture
def start():
    jobs = []

    def run(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield run
    for job in jobs:
        job.close()


def test_a_stopped_node_is_given_up_and_ends_itself_when_it_wakes(start):
    job = start(3, steps=200)
    job.wait_for(r"generation 1 start rank \d of 3", count=3)
    agent, worker = job.pids("node1")
    time.sleep(0.5)
    for pid in (agent, worker):
        os.kill(pid, signal.SIGSTOP)
    job.wait_for(r"\[node[02].0\] generation 2 failure rank \d of 2 .* lost node1", count=2)
    for pid in (agent, worker):
        os.kill(pid, signal.SIGCONT)
    until(lambda: gone(worker))
    job.wait_for(r"\[node1.0\] generation 3 join rank \d of 3")
    assert job.end() == 0, job.lines


def test_a_node_and_the_coordinator_are_killed_at_once(start):
    job = start(3, steps=150)
    job.wait_for(r"generation 1 start rank \d of 3", count=3)
    time.sleep(0.5)
    coordinator = children(job.process.pid, "coordinator")
    os.kill(job.pids("node1")[0], signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    job.wait_for(r"generation \d+ \w+ rank \d of 2", count=2)
    assert job.end() == 0, job.lines
    job.wait_for(r"done at step 150", count=2)


def children(pid, word):
    """Returns the child of a process whose command line holds a word."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        for child in file.read().split():
            if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
    raise AssertionError(f"no child {word}")
