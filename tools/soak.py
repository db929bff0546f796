"""Trains on 8 emulated nodes that are killed, hang, leave and come back, for as long as asked.

    .venv/bin/python tools/soak.py --minutes 30 --seed 1

From outside, by process id, and after times drawn with a mean of a minute: SIGKILL to a training
process, SIGKILL to an agent (a whole node), SIGSTOP to a training process with SIGCONT some
seconds later, SIGTERM to an agent (it leaves as planned). Who went comes back within half a minute.

Looked at on the way: that steps go on, that a process which was not struck lives on under its
pid, that descriptors, sockets, threads and memory of those who live through recoveries stay. At the
end: that no process, no shared memory and no temporary file is left, that all partial checkpoints
that are there are whole, and that each loss is that of stock Megatron, trained undisturbed on 2
ranks for as many steps.

Each world sums in an order of its own, and training amplifies a last bit: where a router's choice
for a token hangs on it, the token goes to another expert, and from there on two runs differ by more
than sums do. Stock Megatron on 2 ranks and on 4 differ so too. Hence two bars, both in fp32 and
relative to the loss, or to 1 where that is less:

- until the first token goes elsewhere (the soak records what every expert gets in every step, as
  does the undisturbed run), losses are equal to 1e-5;
- after it no loss is further off than 3 times what those two undisturbed runs of stock Megatron
  differ by at most.

The learning rate is low, so that the first bar holds for long and the second is sharp: a step that
is left out or done twice moves later losses by more, and other samples by a hundred times as much.

Ends with a table and status 0, or 1 if anything was wrong.
"""

import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from soak_watch import (
    Growth,
    SharedMemory,
    Tail,
    adopt_orphans,
    descendants,
    files_under,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.verify import damage
from megatron_resilient.commands.flag_types import above_0
from megatron_resilient.elastic import launcher
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.protocol import TOKEN_VARIABLE
from megatron_resilient.telemetry import read_events
from tests.support.pretrain_pool import CPU_FLAGS, PretrainPool, flags

ROOT = Path(__file__).resolve().parents[1]
NODES = 8
MOST_ABSENT = 3
KINDS = ("kill", "kill-node", "hang", "leave")
BACK_SECONDS = (3.0, 30.0)
HANG_SECONDS = (1.0, 20.0)
SETTLED_SECONDS = 30.0  # a node that was struck counts as absent so long at least
QUIET_SECONDS = 5.0
STALL_SECONDS = 90.0
END_SECONDS = 90.0
POLL_SECONDS = 0.2
TOLERANCE = 1e-5
CHAOS_FACTOR = 3  # of the difference between two undisturbed runs, after the first token's flip
LOSS = "lm loss"
# Growth for a recovery that is no leak yet: a socket or thread that ends late.
ALLOWED = {"descriptors": 0.5, "sockets": 0.5, "threads": 0.5}
FEWEST_RECOVERIES = 3  # that a process must have lived through to be judged
LIMITS = Limits(
    heartbeat_interval=0.5,
    heartbeat_timeout=5,
    fence_timeout=30,
    hang_timeout=60,
    join_window=2,
    rejoin_timeout=120,
    coordinator_timeout=120,
    leave_timeout=60,
)
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": NODES,
    # See above: thousands of steps that are to be those of another world must be small.
    "lr": 1e-5,
    "min_lr": 1e-6,
    "lr_decay_style": "constant",
}
# Saves go on all the time, so that most strikes hit one.
PARTIAL_SAVES = {
    "save_interval": 20,
    "resilient_checkpoint_format": "experts",
    "resilient_checkpoint_experts": 2,
    "resilient_checkpoint_keep": 5,
}
# Three replicas at least: two nodes may go at once, also while a third one is away.
REPLICAS = {"resilient_slots_per_rank": 6, "resilient_min_replicas": 3}
console = Console(width=110, highlight=False)


@dataclass
class Node:
    """One emulated node.

    Attributes:
        agent: its process; None while it is down.
        strikes: how often it was struck: each explains one more start of its worker.
        struck_at: when it was struck last.
        back_at: when it is to be started again.
        stopped: a worker that was stopped, and when it is to go on.
        leaving: whether it was asked to leave.
    """

    name: str
    agent: psutil.Process | None = None
    strikes: int = 0
    struck_at: float = -SETTLED_SECONDS
    back_at: float | None = None
    stopped: tuple[psutil.Process, float] | None = None
    leaving: bool = False

    def worker(self) -> psutil.Process | None:
        """Returns its training process."""
        with suppress(psutil.NoSuchProcess):
            if self.agent is not None:
                return next(iter(self.agent.children()), None)
        return None

    def is_available(self, now: float) -> bool:
        """Whether it is there, and has been for a while."""
        settled = now - self.struck_at >= SETTLED_SECONDS
        return settled and self.stopped is None and self.worker() is not None


@dataclass
class Findings:
    """What was seen.

    Attributes:
        losses: by step.
        loads: tokens per expert, by step and layer.
        first_flip: the first step in which an expert did not get the tokens of the undisturbed run.
    """

    losses: dict[int, float] = field(default_factory=dict)
    loads: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    first_flip: int | None = None
    recoveries: list[dict] = field(default_factory=list)
    struck: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    not_struck: int = 0
    saves: int = 0
    failed_saves: int = 0
    joins: int = 0
    wrong: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Notes what must not be."""
        self.wrong.append(text)
        console.print(f"WRONG: {text}", style="red", soft_wrap=True)


@dataclass(frozen=True)
class Differences:
    """Largest differences of losses.

    Attributes:
        before: of the soak to an undisturbed run, until a token went to another expert.
        after: since then.
        usual: between undisturbed runs on 2 and on 4 ranks, at any step.
    """

    before: float
    after: float
    usual: float


class Stalled(Exception):
    """Nothing goes on."""


class Soak:
    """The job, and who strikes it; a context manager that leaves no process behind."""

    def __init__(
        self, folder: Path, minutes: float, mean_seconds: float, seed: int, steps_asked: int
    ) -> None:
        """Starts the coordinator and the process that forks nodes.

        Args:
            folder: for all that the job writes.
            minutes: how long nodes are struck.
            mean_seconds: between two strikes.
            seed: of all draws.
            steps_asked: of the training; more than it can make.
        """
        self.folder, self.found = folder, Findings()
        self.growth, self.own_growth = Growth(), Growth()
        self._steps_asked = steps_asked
        self._minutes, self._mean, self._draw = minutes, mean_seconds, random.Random(seed)
        self._nodes = {f"node{number}": Node(f"node{number}") for number in range(NODES)}
        self._events = Tail(folder / "run" / "events.jsonl")
        self._said = Tail(folder / "nodes.json")
        self._world, self._latest_step = 0, time.monotonic()
        self._latest_change = time.monotonic()
        self._sampled_after = -1
        self._began = time.monotonic()
        self._start_processes()

    def _start_processes(self) -> None:
        folder = self.folder
        temporary = folder / "tmp"
        temporary.mkdir()
        port = launcher.free_port()
        environment = os.environ | {
            TOKEN_VARIABLE: secrets.token_hex(16),
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        own = flags(
            **MODEL,
            **REPLICAS,
            train_iters=self._steps_asked,
            expert_model_parallel_size=NODES,
            **first_weights(folder),
            save=folder / "checkpoints",
            **PARTIAL_SAVES,
            resilient_run_dir=folder / "run",
            resilient_expert_load_interval=1,
        )
        settings = {
            "host": launcher.LOOPBACK,
            "port": port,
            "limits": asdict(LIMITS),
            "log_dir": str(self.folder / "logs"),
        }
        coordinator = [
            *(sys.executable, "-m", "megatron_resilient.cli", "coordinator", "--port", str(port)),
            *("--nnodes", f"1:{NODES}", *LIMITS.flags(), "--run-dir", str(self.folder / "run")),
        ]
        nodes = [
            *(sys.executable, str(ROOT / "tools" / "soak_nodes.py"), json.dumps(settings)),
            *(str(ROOT / "examples" / "pretrain_moe.py"), *own),
        ]
        with (
            (self.folder / "coordinator.log").open("w") as told,
            (self.folder / "nodes.json").open("w") as said,
            (self.folder / "nodes.log").open("w") as log,
        ):
            options = {"cwd": self.folder, "env": environment, "start_new_session": True}
            self._coordinator = subprocess.Popen(
                coordinator, stdin=subprocess.DEVNULL, stdout=told, stderr=told, **options
            )
            self._forker = subprocess.Popen(
                nodes, stdin=subprocess.PIPE, stdout=said, stderr=log, text=True, **options
            )

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    @property
    def step(self) -> int:
        """The newest step."""
        return max(self.found.losses, default=0)

    # Running.

    def run(self) -> None:
        """Strikes until the time is up, has all nodes come back, and ends the job.

        Raises:
            Stalled: no step for too long.
        """
        for node in self._nodes.values():
            self._start(node)
        self._until(lambda: self.step >= 5, "the first steps")
        end = time.monotonic() + 60 * self._minutes
        at = time.monotonic() + self._draw.expovariate(1 / self._mean)
        while time.monotonic() < end:
            self._look()
            if time.monotonic() >= at:
                self._strike()
                at = time.monotonic() + self._draw.expovariate(1 / self._mean)
        self._say("the time is up: all nodes come back")
        for node in self._nodes.values():
            node.back_at = 0.0 if node.back_at is not None else None
            if node.stopped is not None:
                node.stopped = (node.stopped[0], 0.0)
        self._until(self._is_whole, f"all {NODES} nodes to train again")
        self._latest_change = time.monotonic()
        self._until(self._is_quiet, "quiet")
        self._sample()
        self._leave()

    def _until(self, condition, what: str) -> None:
        while not condition():
            self._look()
            if time.monotonic() - self._latest_change > 4 * STALL_SECONDS:
                raise Stalled(f"waited in vain for {what}")

    def _is_whole(self) -> bool:
        now = time.monotonic()
        return (
            self._world == NODES
            and all(
                node.worker() is not None and node.back_at is None and node.stopped is None
                for node in self._nodes.values()
            )
            and now - self._latest_change > QUIET_SECONDS
        )

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._latest_change > QUIET_SECONDS

    def _look(self) -> None:
        """Reads what happened, brings back who is due, and takes samples."""
        time.sleep(POLL_SECONDS)
        for event in self._events.read():
            self._note(event)
        for said in self._said.read():
            self._hear(said)
        now = time.monotonic()
        for node in self._nodes.values():
            if node.stopped is not None and now >= node.stopped[1]:
                with suppress(psutil.NoSuchProcess):
                    node.stopped[0].resume()
                node.stopped, node.struck_at = None, now
            if node.back_at is not None and now >= node.back_at and node.agent is None:
                self._start(node)
                self.found.joins += 1
        if self._world == NODES and self._is_quiet():
            self._sample()
        for name, process in (("coordinator", self._coordinator), ("forker", self._forker)):
            if process.poll() is not None:
                raise Stalled(f"the {name} ended with status {process.returncode}")
        if now - self._latest_step > STALL_SECONDS:
            raise Stalled(f"no step for {STALL_SECONDS:g} s, the last was {self.step}")

    def _note(self, event: dict) -> None:
        if event["event"] == "step":
            self._latest_step = time.monotonic()
            step, loss = event["step"], event["loss"][LOSS]
            before = self.found.losses.setdefault(step, loss)
            if abs(before - loss) > TOLERANCE * max(1.0, abs(loss)):
                self.found.fail(f"step {step} was logged with loss {before}, then with {loss}")
        elif event["event"] == "expert_load":
            self.found.loads.setdefault((event["step"], event["layer"]), event["tokens"])
        elif event["event"] == "run_start" and self._world == 0:
            # Its groups are made from now on: what it has is sampled when that is over.
            self._world, self._latest_change = event["world_size"], time.monotonic()
        elif event["event"] == "checkpoint_saved":
            self.found.saves += 1
        elif event["event"] == "checkpoint_failed":
            self.found.failed_saves += 1
            self._say(f"save given up: {event['why']}")
        elif event["event"] == "recovery":
            self.found.recoveries.append(event)
            self._world, self._latest_change = event["world_size"], time.monotonic()
            nodes = [f"-{name}" for name in event["lost_nodes"]]
            nodes += [f"+{name}" for name in event["joined_nodes"]]
            self._say(
                f"step {event['step']}: {event['cause']} {' '.join(nodes)}: {self._world} ranks, "
                f"{sum(event['seconds'].values()):.1f} s, state from {event['source']}"
            )
            if event["source"] != "memory" or event["lost_steps"] or event["lost_experts"]:
                self.found.fail(
                    f"step {event['step']}: state from {event['source']}, {event['lost_steps']} "
                    f"steps lost, experts {event['lost_experts']}"
                )

    def _hear(self, said: dict) -> None:
        node = self._nodes.get(said.get("node", ""))
        if node is None or node.agent is None or node.agent.pid != said["pid"]:
            return
        if "status" not in said:
            return
        node.agent = None
        self._latest_change = time.monotonic()
        if node.back_at is None and not node.leaving:
            self.found.fail(f"the agent of {node.name} ended with status {said['status']}")
        elif node.leaving and said["status"] != 0:
            self.found.fail(f"{node.name} was to leave, and ended with status {said['status']}")
        node.leaving = False

    def _start(self, node: Node) -> None:
        assert self._forker.stdin is not None
        node.back_at = None
        self._forker.stdin.write(node.name + "\n")
        self._forker.stdin.flush()
        while node.agent is None:
            time.sleep(0.05)
            if self._forker.poll() is not None:
                raise Stalled(f"the forker ended with status {self._forker.returncode}")
            for said in self._said.read():
                if said.get("node") == node.name and "status" not in said:
                    node.agent = psutil.Process(said["pid"])
                else:
                    self._hear(said)

    # Striking.

    def _strike(self) -> None:
        now = time.monotonic()
        kind = self._draw.choice(KINDS)
        name = self._draw.choice(sorted(self._nodes))
        away = self._draw.uniform(*BACK_SECONDS)
        hang = self._draw.uniform(*HANG_SECONDS)
        node = self._nodes[name]
        absent = sum(not each.is_available(now) for each in self._nodes.values())
        worker = node.worker()
        if absent >= MOST_ABSENT or not node.is_available(now) or worker is None:
            self.found.not_struck += 1
            return
        assert node.agent is not None
        node.strikes, node.struck_at = node.strikes + 1, now
        self._latest_change = now
        self.found.struck[kind] += 1
        text = f"step {self.step}: {kind} {name}"
        if kind == "kill":
            worker.kill()
        elif kind == "kill-node":
            node.back_at = now + away
            node.agent.kill()
            text += f", back after {away:.0f} s"
        elif kind == "hang":
            node.stopped = (worker, now + hang)
            worker.suspend()
            text += f" for {hang:.0f} s"
        else:
            node.back_at, node.leaving = now + away, True
            node.agent.terminate()
            text += f", back after {away:.0f} s"
        self._say(text)

    def _sample(self) -> None:
        """Looks at what the processes have, once after each recovery."""
        recoveries = len(self.found.recoveries)
        if recoveries == self._sampled_after:
            return
        self._sampled_after = recoveries
        for node in self._nodes.values():
            worker = node.worker()
            if worker is not None:
                self.growth.note(worker.pid, recoveries)
        self.own_growth.note(self._coordinator.pid, recoveries)

    # Ending.

    def _leave(self) -> None:
        """Has all nodes leave as planned; the job saves and ends."""
        self._say(f"step {self.step}: SIGTERM to all nodes")
        for node in self._nodes.values():
            if node.agent is not None:
                node.leaving = True
                node.agent.terminate()
        end = time.monotonic() + END_SECONDS
        while any(node.agent is not None for node in self._nodes.values()):
            time.sleep(POLL_SECONDS)
            for said in self._said.read():
                self._hear(said)
            if time.monotonic() > end:
                alive = [node.name for node in self._nodes.values() if node.agent is not None]
                self.found.fail(f"{', '.join(alive)} did not leave within {END_SECONDS:g} s")
                break
        for event in self._events.read():
            self._note(event)
        try:
            status = self._coordinator.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.found.fail("the coordinator did not end with the job")
        else:
            if status:
                self.found.fail(f"the coordinator ended with status {status}")
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait()
        time.sleep(1)
        for process in descendants(self._waited_for()):
            with suppress(psutil.NoSuchProcess):
                self.found.fail(f"left: process {process.pid} {process.cmdline()[:4]}")

    def check_starts(self) -> None:
        """Checks that no worker was started but for a strike."""
        log = (self.folder / "nodes.log").read_text(encoding="utf-8", errors="replace")
        for node in self._nodes.values():
            starts = len(re.findall(rf"\[{node.name}\] agent \d+ started workers", log))
            if starts > 1 + node.strikes:
                self.found.fail(
                    f"{node.name} was struck {node.strikes} times, and its worker was started "
                    f"{starts} times"
                )

    def check_checkpoints(self) -> None:
        """Checks that there are checkpoints, and that each is whole."""
        checkpoints = self.folder / "checkpoints"
        steps = places.manifests(checkpoints)
        if not steps:
            self.found.fail(f"no checkpoint in {checkpoints}")
        for step in steps:
            manifest = places.read_manifest(places.manifest_path(checkpoints, step))
            for each in damage(checkpoints, manifest):
                self.found.fail(f"checkpoint of step {step}: {each}")

    def check_growth(self) -> None:
        """Checks what those who lived through recoveries have more now."""
        for name, growth in (("a worker", self.growth), ("the coordinator", self.own_growth)):
            for what, allowed in ALLOWED.items():
                grown = growth.per_recovery(what, FEWEST_RECOVERIES)
                if grown is not None and grown > allowed:
                    self.found.fail(f"{name} has {grown:.2f} {what} more for each recovery")

    def _waited_for(self) -> set[int]:
        return {self._coordinator.pid, self._forker.pid}

    def _say(self, text: str) -> None:
        console.print(f"{self.seconds:7.1f} s  {text}", markup=False, soft_wrap=True)

    def __enter__(self) -> "Soak":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in descendants(self._waited_for()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in (self._coordinator, self._forker):
            process.kill()
            process.wait()
        descendants(set())  # reaps


def first_weights(folder: Path) -> dict[str, object]:
    """Returns the flags that begin after the first step."""
    return {"load": folder / "first", "no_load_rng": True}


def undisturbed(
    steps_asked: int, last: int, ranks: int = 2, plugin: bool = False, **changes: object
) -> list[float]:
    """Trains up to a step, stock or with the plugin without replicas.

    Returns:
        The losses.
    """
    with PretrainPool(ranks, plugin=plugin) as pool:
        result = pool.run_argv(
            flags(
                **CPU_FLAGS,
                **MODEL,
                train_iters=steps_asked,  # the order of samples depends on it
                exit_interval=last,
                expert_model_parallel_size=ranks,
                **changes,
            ),
            timeout_seconds=120 + 5 * last,
        )
    if result.failed is not None:
        sys.exit(f"soak: the undisturbed run failed:\n{result.failed['traceback']}")
    return result.losses


def difference(loss: float, other: float) -> float:
    """Returns how far two losses are apart, relative to `other` or to 1."""
    return abs(loss - other) / max(1.0, abs(other))


def find_first_flip(found: Findings, usual_run: Path) -> None:
    """Compares what experts got with an undisturbed run, step by step.

    Args:
        found: has the loads.
        usual_run: run folder of the undisturbed run.
    """
    for event in read_events(usual_run):
        if event["event"] != "expert_load":
            continue
        tokens = found.loads.get((event["step"], event["layer"]))
        if tokens is not None and tokens != event["tokens"]:
            found.first_flip = event["step"]
            return


def check_losses(found: Findings, expected: list[float], other: list[float]) -> Differences:
    """Judges all losses.

    Args:
        found: has the losses by step.
        expected: those of an undisturbed run, from step 2 on.
        other: those of one on another number of ranks.
    """
    last = max(found.losses)
    missing = sorted(set(range(2, last + 1)) - found.losses.keys())
    if missing:
        found.fail(f"{len(missing)} steps were never logged: {missing[:10]}")
    wanted = dict(enumerate(expected, start=2))
    if last not in wanted:
        found.fail(f"the reference ended after step {max(wanted, default=1)}")
    flip = last + 1 if found.first_flip is None else found.first_flip
    usual = max(map(difference, other, expected), default=0.0)
    before = after = 0.0
    for step, loss in sorted(found.losses.items()):
        if step not in wanted:
            continue
        error = difference(loss, wanted[step])
        bar = TOLERANCE if step < flip else max(TOLERANCE, CHAOS_FACTOR * usual)
        if not error <= bar:
            found.fail(f"the loss of step {step} is off by {error:.1e}; bar {bar:.1e}")
        if step < flip:
            before = max(before, error)
        else:
            after = max(after, error)
    return Differences(before, after, usual)


def show(soak: Soak, differences: Differences | None, seconds: float) -> None:
    """Prints the table."""
    found = soak.found
    stops = sorted(sum(event["seconds"].values()) for event in found.recoveries)
    table = Table(show_header=False)
    rows = [
        ("nodes, minutes", f"{NODES}, {seconds / 60:.1f}; load {os.getloadavg()[1]:.1f}"),
        ("steps", str(soak.step)),
        *((kind, str(number)) for kind, number in found.struck.items()),
        ("starts after a loss or a leave", str(found.joins)),
        ("drawn, but too many were away", str(found.not_struck)),
        ("recoveries", str(len(stops))),
        ("saves that were made, given up", f"{found.saves}, {found.failed_saves}"),
    ]
    if stops:
        rows.append(
            ("seconds of one", f"median {stops[len(stops) // 2]:.1f}, longest {stops[-1]:.1f}")
        )
    if differences is not None:
        flip = found.first_flip
        until = "" if flip is None else f" until step {flip}, where a token went elsewhere"
        rows.append(
            (
                f"largest difference of a loss (bar {TOLERANCE:g})",
                f"{differences.before:.1e}{until}",
            )
        )
        if flip is not None:
            bar = f"bar {CHAOS_FACTOR} x {differences.usual:.1e}, stock's on 2 ranks and on 4"
            rows.append((f"after that ({bar})", f"{differences.after:.1e}"))
    for name, growth in (("worker", soak.growth), ("coordinator", soak.own_growth)):
        followed = growth.followed(FEWEST_RECOVERIES)
        if not followed:
            continue
        for what in ("rss_bytes", *ALLOWED):
            grown = growth.per_recovery(what, FEWEST_RECOVERIES) or 0.0
            shown = f"{grown / 2**20:+.2f} MiB" if what == "rss_bytes" else f"{grown:+.2f}"
            rows.append((f"{name}: {what} for each recovery", f"{shown} (median of {followed})"))
    rows.append(("wrong", "nothing" if not found.wrong else "\n".join(found.wrong)))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def begin(folder: Path) -> None:
    """Makes the folder; what an earlier soak left in it goes."""
    marker = folder / ".made-by-soak"
    if folder.exists():
        if not marker.is_file():
            sys.exit(f"soak: --dir {folder}: is there and no soak made it; name another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    marker.touch()


def main() -> int:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=above_0(), default=30.0, help="default: %(default)g")
    parser.add_argument("--seed", type=int, default=1, help="of all draws; default: %(default)s")
    parser.add_argument(
        "--mean-seconds", type=above_0(), default=60.0, help="between strikes; default: %(default)g"
    )
    parser.add_argument("--dir", type=Path, default=Path("soak_run"), help="default: %(default)s")
    args = parser.parse_args()
    folder = args.dir.resolve()
    begin(folder)
    # Whoever ends the soak ends the job: SIGTERM unwinds the stack as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What experts start with depends on the number of ranks: all begin with the same first step.
    console.print("the first step: stock Megatron on 2 ranks")
    steps_asked = int(args.minutes * 60 * 20) + 1000  # more than there can be
    undisturbed(steps_asked, 1, save=folder / "first", save_interval=1)
    adopt_orphans()
    shared_memory = SharedMemory()
    with Soak(folder, args.minutes, args.mean_seconds, args.seed, steps_asked) as soak:
        try:
            soak.run()
        except Stalled as stalled:
            soak.found.fail(f"{stalled}; see {folder / 'logs'}")
        seconds = soak.seconds
    soak.check_starts()
    soak.check_growth()
    soak.check_checkpoints()
    for left in shared_memory.left():
        soak.found.fail(f"left: shared memory {left}")
    for left in files_under(folder / "tmp"):
        soak.found.fail(f"left: temporary file {left}")
    differences = None
    if soak.found.losses:
        console.print(f"reference: undisturbed on 2 ranks and on 4, {soak.step} steps")
        record = {"resilient_run_dir": folder / "usual", "resilient_expert_load_interval": 1}
        start = first_weights(folder)
        expected = undisturbed(steps_asked, soak.step, plugin=True, **start, **record)
        other = undisturbed(steps_asked, soak.step, ranks=4, **start)
        find_first_flip(soak.found, folder / "usual")
        differences = check_losses(soak.found, expected, other)
    show(soak, differences, seconds)
    return 1 if soak.found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
