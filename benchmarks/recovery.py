"""How long a lost node stops training: ours against a relaunch by torchrun.

The same model on 4 single-rank nodes of this machine's CPU, one job after the other. Measured is
the time from a SIGKILL to the end of the next step that was not done before. What was done since
the checkpoint, and has to be done again, is counted apart, as lost work.

ours: `megatron-resilient run --emulate-nodes 4`; an agent is killed and takes its training process
along. 3 nodes go on; the node comes back, and training is on 4 again before the next kill.

relaunch: `torchrun --max-restarts`, features of the plugin off; a rank is killed. torchrun ends
the others and starts 4 new ones at once, on the same machine, from the newest checkpoint of
Megatron (one every 50 steps). That favours it: a lost node has to be noticed and replaced first.
Kills strike 10, 25 and 40 steps after a checkpoint: the mean of what chance would give.

    .venv/bin/python benchmarks/recovery.py

Ends with status 1 if ours is not at least 5 times less, or lost a step.
"""

import argparse
import importlib.util
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_resilient.commands.flag_types import count
from megatron_resilient.telemetry import Event
from tests.support.pretrain_pool import flags
from tools.training_job import TrainingJob, torchrun

NODES = 4
SAVE_INTERVAL = 50
STEPS_AFTER_SAVE = (10, 25, 40)
STEPS_BETWEEN_KILLS = 10
BAR = 5.0
PATIENCE_SECONDS = 240  # for the next step
MODEL = {"expert_model_parallel_size": NODES, "train_iters": 100_000, "lr_decay_iters": 100_000}
console = Console(width=110, highlight=False)


@dataclass(frozen=True)
class Stop:
    """What one kill cost.

    Attributes:
        seconds: from the kill to the end of the next step, new or again.
        lost_steps: that have to be done again.
        phases: of our recovery, in seconds.
    """

    seconds: float
    lost_steps: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All stops of a job, and its step time while nothing happens."""

    stops: list[Stop]
    step_seconds: float

    @property
    def seconds(self) -> float:
        """Median over the kills, without lost work."""
        return statistics.median(stop.seconds for stop in self.stops)

    @property
    def lost_seconds(self) -> float:
        """Mean over the kills of the work that is done twice."""
        return self.step_seconds * statistics.fmean(stop.lost_steps for stop in self.stops)


class Follower:
    """Reads a job's events up to what is waited for."""

    def __init__(self, job: TrainingJob) -> None:
        self._events = job.follow()
        self._seconds: list[float] = []
        self.step = 0

    def next(self, kind: str, after: float = 0.0, **values: object) -> Event:
        """Returns the next event of a kind with these fields that is younger than `after`."""
        for event in self._events:
            if event["event"] == "step":
                self.step = event["step"]
                self._seconds.append(event["seconds"])
                signal.alarm(PATIENCE_SECONDS)
            matches = event["event"] == kind and event["time"] > after
            if matches and all(event.get(name) == value for name, value in values.items()):
                return event
        raise SystemExit(f"the job ended before {kind} {values or ''}")

    def steps(self, number: int) -> None:
        """Waits for so many steps more."""
        for _ in range(number):
            self.next("step")

    def step_seconds(self) -> float:
        """Returns the median over all steps: those that a kill made longer are few."""
        return statistics.median(self._seconds)


def ours(folder: Path, kills: int) -> Measured:
    """Kills nodes of an elastic job."""
    log = folder / "ours.log"
    own = flags(**MODEL, resilient_slots_per_rank=4, resilient_expert_load_interval=0)
    stops, moment = [], random.Random(1)
    with TrainingJob(NODES, own, folder / "ours", log) as job:
        follower = Follower(job)
        for number in range(kills):
            follower.steps(STEPS_BETWEEN_KILLS)
            # Anywhere in a step.
            time.sleep(moment.uniform(0, follower.step_seconds()))
            killed = time.time()
            job.kill_node(f"node{NODES - 1 - number % NODES}")
            recovery = follower.next("recovery", killed, joined_nodes=[])
            done = int(
                re.findall(r"RecoveryReport: .* go on after step (\d+)", log.read_text())[-1]
            )
            # A step that was agreed on before the kill is only logged after it.
            ended = recovery if follower.step > done else follower.next("step", step=done + 1)
            seconds, phases = ended["time"] - killed, recovery["seconds"]
            # From the kill to the first that anybody saw of it, mostly.
            phases = {"unseen": seconds - sum(phases.values()), **phases}
            stops.append(Stop(seconds, recovery["lost_steps"], phases))
            console.print(f"ours: killed node, {show(stops[-1])}", soft_wrap=True)
            follower.next("recovery", killed, lost_nodes=[], world_size=NODES)
        return Measured(stops, follower.step_seconds())


def relaunch(folder: Path, kills: int) -> Measured:
    """Kills ranks of a torchrun job."""
    log, checkpoints = folder / "relaunch.log", folder / "checkpoints"
    own = flags(
        **MODEL,
        save=checkpoints,
        load=checkpoints,
        save_interval=SAVE_INTERVAL,
        resilient_expert_load_interval=0,
    )
    launcher = torchrun(NODES, "--max-restarts", str(kills))
    # With the store that torchrun shares with its ranks, gloo ranks that start again find the
    # addresses of the dead ones there and wait for ever (seen with torch 2.11).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    stops = []
    with TrainingJob(NODES, own, folder / "relaunch", log, launcher) as job:
        follower = Follower(job)
        follower.next("checkpoint_saved")
        for number in range(kills):
            lost = STEPS_AFTER_SAVE[number % len(STEPS_AFTER_SAVE)]
            follower.next("step", step=SAVE_INTERVAL + lost)
            killed = time.time()
            psutil.Process(job.pid).children()[0].kill()
            reached = follower.step
            loaded = follower.next("checkpoint_loaded", killed)
            ended = follower.next("step", killed, step=loaded["step"] + 1)
            stops.append(Stop(ended["time"] - killed, reached - loaded["step"]))
            console.print(f"relaunch: killed a rank, {show(stops[-1])}", soft_wrap=True)
        return Measured(stops, follower.step_seconds())


def show(stop: Stop) -> str:
    """Returns a stop as text."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stop.phases.items())
    return (
        f"{stop.seconds:.2f} s"
        + (f" ({phases})" if phases else "")
        + (f", {stop.lost_steps} steps lost")
    )


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=count(), default=3, help="of each job; default: %(default)s"
    )
    args = parser.parse_args()
    # Whatever ends the benchmark unwinds the stack, and with it ends the job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"no step for {PATIENCE_SECONDS} s"))
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        systems = {
            "ours": ours(Path(folder), args.kills),
            "relaunch by torchrun": relaunch(Path(folder), args.kills),
        }
    table = Table(
        title=f"{NODES} ranks on {len(os.sched_getaffinity(0))} cores, load "
        f"{os.getloadavg()[1]:.1f}; median of {args.kills} kills"
    )
    table.add_column("system")
    for column in ("kill to next step", "range", "lost work (mean)", "a step", "sum"):
        table.add_column(column, justify="right")
    for name, one in systems.items():
        each = [stop.seconds for stop in one.stops]
        table.add_row(
            name,
            f"{one.seconds:.2f} s",
            f"{min(each):.2f} to {max(each):.2f}",
            f"{one.lost_seconds:.2f} s",
            f"{one.step_seconds:.3f} s",
            f"{one.seconds + one.lost_seconds:.2f} s",
        )
    console.print(table)
    own, peer = systems.values()
    ratio = peer.seconds / own.seconds
    console.print(
        f"relaunch / ours: {ratio:.1f} without lost work (bar: at least {BAR:g}), "
        f"{(peer.seconds + peer.lost_seconds) / (own.seconds + own.lost_seconds):.1f} with it"
    )
    phases = own.stops[0].phases
    console.print(
        "our phases, medians: "
        + ", ".join(
            f"{name} {statistics.median(stop.phases[name] for stop in own.stops):.2f} s"
            for name in phases
        )
    )
    installed = importlib.util.find_spec("nvidia_resiliency_ext") is not None
    console.print(
        "Megatron's --inprocess-restart (NVRx): not measured, "
        + (
            "it needs GPUs and NCCL, and there is no case for it here"
            if installed
            else "nvidia-resiliency-ext cannot be imported here"
        )
    )
    return 0 if ratio >= BAR and not own.lost_seconds else 1


if __name__ == "__main__":
    sys.exit(main())
