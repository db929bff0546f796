"""Elastic pretraining jobs for tests: start one, watch it, strike it, and see what it did.

A job is what a user starts: `megatron-resilient coordinator` and `megatron-resilient run
--emulate-nodes`, forked from a process that has imported Megatron already.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_resilient.elastic.messages import StatusQuery
from megatron_resilient.elastic.query import ask
from megatron_resilient.errors import CoordinatorLostError
from megatron_resilient.telemetry import EVENTS_FILE, read_events
from megatron_resilient.telemetry.summary import RunSummary
from tests.support.pretrain_pool import TINY, flags, free_port
from tests.support.processes import gone

ROOT = Path(__file__).parents[2]
TOKEN = "a secret of the tests"
SCRIPT = ROOT / "tests" / "support" / "pretrain_recorded.py"

# Generous, because machines are slow: who tests a limit sets it.
LIMITS = {
    "heartbeat-interval": 0.5,
    "heartbeat-timeout": 8,
    "fence-timeout": 30,
    "hang-timeout": 300,
    "join-window": 4,  # all nodes are to be there at the start
    "rejoin-timeout": 60,
    "coordinator-timeout": 60,
}

# The order of sums follows the world, and in time a token is routed otherwise for it: long runs
# that are to be equal learn slowly.
SLOW = {"lr": 1e-4, "min_lr": 1e-5}

MODEL = TINY | {
    "global_batch_size": 12,
    "train_iters": 14,
    "resilient_slots_per_rank": 4,
    "resilient_expert_load_interval": 0,
}


class Preloaded:
    """The process that jobs are forked from; a context manager."""

    def __init__(self):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # asked for by Megatron with TP > 1
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "MEGATRON_RESILIENT_TOKEN": TOKEN,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self._changed = threading.Condition()
        self._started = []
        self._ended = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def start(self, *argv, output, **environment):
        """Starts a command; returns its pid."""
        request = {
            "argv": [str(one) for one in argv],
            "environment": {name: str(value) for name, value in environment.items()},
            "output": str(output),
        }
        with self._changed:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: self._started, timeout=120)
            return self._started.pop()

    def status(self, pid, seconds):
        """Returns how a command ended, minus a signal's number; waits for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self._ended, timeout=seconds):
                raise TimeoutError(f"process {pid} runs still after {seconds} s")
            return self._ended[pid]

    def has_ended(self, pid):
        with self._changed:
            return pid in self._ended

    def _read(self):
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            with self._changed:
                if "pid" in said:
                    self._started.append(said["pid"])
                elif "ended" in said:
                    self._ended[said["ended"]] = said["status"]
                self._changed.notify_all()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Job:
    """One job.

    Args:
        preloaded: forks it.
        folder: for all that it writes; new.
        nodes: how many there are.
        options: flags of `run` for which `LIMITS` are no good, and others.
        nnodes: `MIN:MAX`.
        changes: changes of `MODEL`.
    """

    def __init__(self, preloaded, folder, nodes, options=(), nnodes=None, **changes):
        folder.mkdir(parents=True)
        self.folder = folder
        self._preloaded = preloaded
        self._samples = folder / "samples.jsonl"
        self._output = folder / "output"
        self.port = free_port()
        limits = LIMITS | {k: v for k, v in dict(options).items() if k in LIMITS}
        others = {k: v for k, v in dict(options).items() if k not in LIMITS}
        self._limits = [word for k, v in limits.items() for word in (f"--{k}", v)]
        self._nnodes = nnodes or f"1:{nodes}"
        self.coordinator = None
        self.start_coordinator()
        arguments = flags(**(MODEL | {"resilient_run_dir": str(folder / "run")} | changes))
        self.pid = self._preloaded.start(
            *("run", "--emulate-nodes", nodes, "--coordinator", f"127.0.0.1:{self.port}"),
            *("--nnodes", self._nnodes),
            *self._limits,
            *(word for k, v in others.items() for word in (f"--{k}", v)),
            *(SCRIPT, *arguments),
            output=self._output,
            SAMPLES_FILE=self._samples,
        )

    def start_coordinator(self):
        self.coordinator = self._preloaded.start(
            *("coordinator", "--port", self.port, "--nnodes", self._nnodes, *self._limits),
            *("--run-dir", self.folder / "run"),
            output=self._output,
        )

    def kill_coordinator(self):
        os.kill(self.coordinator, signal.SIGKILL)
        self._preloaded.status(self.coordinator, 20)

    # What it says.

    @property
    def output(self):
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def events(self, kind=None):
        run_dir = self.folder / "run"
        events = read_events(run_dir) if (run_dir / EVENTS_FILE).exists() else []
        return [event for event in events if kind in (None, event["event"])]

    @property
    def losses(self):
        """{step: loss}, as the run went on from it."""
        return {event["step"]: event["loss"]["lm loss"] for event in self.events("step")}

    @property
    def recoveries(self):
        return self.events("recovery")

    @property
    def microbatches(self):
        if not self._samples.exists():
            return []
        return [json.loads(line) for line in self._samples.read_text().splitlines()]

    def samples(self):
        """{step: sorted numbers of its samples}, of the last time that it was done."""
        told = self.microbatches
        last = {}
        for one in told:
            last[one["step"]] = max(last.get(one["step"], 0), one["generation"])
        found = defaultdict(list)
        for one in told:
            if one["generation"] == last[one["step"]]:
                found[one["step"]] += one["samples"]
        return {step: sorted(samples) for step, samples in sorted(found.items())}

    def pids(self):
        """{node: pids of the processes that trained there, in order}."""
        found = defaultdict(dict)
        for one in self.microbatches:
            found[one["node"]][one["pid"]] = None
        return {node: list(pids) for node, pids in found.items()}

    def started(self):
        """Pids of all agents and workers that this job ever started."""
        found = re.findall(r"agent (\d+) started workers ([\d ]+)", self.output)
        return {int(pid) for agent, workers in found for pid in (agent, *workers.split())}

    def status(self):
        return ask(f"127.0.0.1:{self.port}", TOKEN.encode(), StatusQuery())

    def node(self, name):
        """What the coordinator says of a node."""
        return next(node for node in self.status()["nodes"] if node["node"] == name)

    # Waiting.

    def until(self, condition, seconds=60):
        """Waits for a condition; fails when the job ends before it."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self._preloaded.has_ended(self.pid)
            if found := condition():
                return found
            assert not ended, f"the job ended\n{self.tail()}"
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.05)

    def until_step(self, step, seconds=60):
        self.until(lambda: max(self.losses, default=0) >= step, seconds)

    def until_said(self, pattern, seconds=60):
        return self.until(lambda: re.search(pattern, self.output), seconds)

    def until_status(self, condition, seconds=60):
        def holds():
            try:
                return condition(self.status())
            except CoordinatorLostError:
                return False

        self.until(holds, seconds)

    def end(self, seconds=120):
        """Waits for the end; returns the exit status of `run`."""
        try:
            return self._preloaded.status(self.pid, seconds)
        except TimeoutError as error:
            error.add_note(self.tail())
            raise

    def ok(self, seconds=120):
        """Waits for an end without an error."""
        status = self.end(seconds)
        assert status == 0, self.tail()
        return self

    def tail(self, lines=40):
        """What it said at last that is of interest."""
        telling = re.compile(
            r"Report|Error|fault inj|is lost|is over|generation \d|\] agent|the coordinator|"
            r"no live|gives up|leaves|too few|Traceback|   File .*(megatron_resilient|tests)/"
        )
        told = [one[:400] for one in self.output.splitlines() if telling.search(one)]
        return "\n".join([str(self.folder), *told[-lines:]])

    def close(self):
        """Kills what still runs, and checks that nothing outlives it."""
        for pid in (self.pid, self.coordinator):
            if not self._preloaded.has_ended(pid):
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.killpg(pid, signal.SIGKILL)
                self._preloaded.status(pid, 20)
        left = self.started()
        deadline = time.monotonic() + 10
        while left := {pid for pid in left if not gone(pid)}:
            assert time.monotonic() < deadline, f"processes {left} outlive their job"
            time.sleep(0.02)


def worst(losses, reference):
    """Returns (largest relative difference, its step); every step must be there."""
    assert losses.keys() == reference.keys()
    return max((abs(losses[step] / loss - 1), step) for step, loss in reference.items())


def assert_same_run(job, reference, survivors, tolerance=1e-5):
    """Asserts that a job did what an undisturbed one did.

    Args:
        job: ended.
        reference: the same without faults.
        survivors: names of the nodes whose processes must be those of the start.
        tolerance: relative, of losses.
    """
    difference, step = worst(job.losses, reference.losses)
    assert difference <= tolerance, f"step {step} differs by {difference:.1e}\n{job.tail()}"
    assert job.samples() == reference.samples()
    for event in job.events("step"):  # twice where evaluation or saving were cut short
        assert event["loss"]["lm loss"] == pytest.approx(job.losses[event["step"]], rel=1e-6)
    pids = job.pids()
    assert {node: len(pids[node]) for node in survivors} == dict.fromkeys(survivors, 1)
    assert all(one["lost_steps"] == 0 for one in job.recoveries), job.recoveries
    assert all(one["source"] == "memory" for one in job.recoveries), job.recoveries
    assert RunSummary.from_events(job.events()).lost_steps == 0
