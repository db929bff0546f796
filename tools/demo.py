"""Trains a small Mixture-of-Experts GPT on real text on this machine's CPU, while nodes fail.

The text is the source code of Python's standard library. Four emulated nodes share eight experts
and have room for three times as many, so that each is on two nodes at least and hot ones on more.

First one node is killed in mid-run: the others go on from memory with the next step, and take the
node in again when it comes back. Later all nodes are killed, as if the power had failed, and a
second job goes on from the last checkpoint. The steps that had been done after that checkpoint are
done again: their losses must be the same to the last bit. From there on saves are partial: two of
eight experts each. At last the file of one expert is damaged, and a third job finds that out, takes
the version before, and says what that lost.

Ends with a table and status 0 if no step was lost with the node, the resume was exact, the damage
was found and the loss fell, else with status 1.
"""

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_result import Result, loaded_line, recovery_line
from rich.console import Console
from rich.status import Status
from rich.table import Table
from training_job import TrainingJob

from megatron_resilient.checkpoint.directory import manifest_path, manifests, read_manifest
from megatron_resilient.checkpoint.manifest import Manifest
from megatron_resilient.telemetry import Event, read_events
from megatron_resilient.telemetry.summary import MAIN_LOSS

NODES = 4  # with one rank each
LOST_NODE = "node2"
EXPERTS = 8
TAIL_LINES = 30  # of a log, shown when something failed
console = Console(highlight=False)


class DemoError(Exception):
    """A stage failed; `log` holds what its program printed, if there was one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Size:
    """How large the model is and how long it is trained."""

    layers: int
    hidden_size: int
    seq_length: int
    steps: int
    node_killed_step: int  # one node is killed when this step is done
    saved_step: int  # the first job goes on after it without another save
    killed_step: int  # the first job is killed when this one is done
    partial_steps: int  # between two saves of the second job, of two experts a layer each
    last_steps: int  # of the third job, which finds damage
    evaluation_interval_steps: int
    shown_interval_steps: int


FULL = Size(
    layers=4,
    hidden_size=128,
    seq_length=256,
    steps=400,
    node_killed_step=80,
    saved_step=200,
    killed_step=215,
    partial_steps=50,
    last_steps=10,
    evaluation_interval_steps=30,
    shown_interval_steps=25,
)
QUICK = Size(
    layers=2,
    hidden_size=64,
    seq_length=128,
    steps=60,
    node_killed_step=5,
    saved_step=40,
    killed_step=45,
    partial_steps=10,
    last_steps=4,
    evaluation_interval_steps=11,
    shown_interval_steps=10,
)


@dataclass(frozen=True)
class Folder:
    """Where the demo puts what it makes."""

    root: Path

    @property
    def data(self) -> Path:
        """Prefix of the dataset and of the tokenizer."""
        return self.root / "data" / "stdlib"

    @property
    def run(self) -> Path:
        """Folder of the events, the summary and the report."""
        return self.root / "run"

    @property
    def checkpoints(self) -> Path:
        """Folder that both jobs save to and load from."""
        return self.run / "checkpoints"

    def log(self, stage: str) -> Path:
        """Where a stage's program prints to."""
        return self.root / f"{stage}.log"

    def begin(self) -> None:
        """Makes the folder; what an earlier demo left in it goes.

        Raises:
            DemoError: something else is there.
        """
        marker = self.root / ".made-by-demo"
        if self.root.exists():
            if not marker.is_file():
                raise DemoError(f"--dir {self.root}: is there and no demo made it; name another")
            shutil.rmtree(self.root)
        for folder in (self.data.parent, self.run):
            folder.mkdir(parents=True)
        marker.touch()


def prepare_data(folder: Folder) -> None:
    """Makes a dataset and a tokenizer from the sources of the standard library."""
    heading("Data: the sources of Python's standard library")
    arguments = ["--input", sysconfig.get_path("stdlib"), "--glob", "*.py"]
    for name in ("test", "tests", "idle_test", "site-packages"):
        arguments += ["--exclude", name]
    arguments += ["--train-tokenizer", "4096", "--append-eod", "--output", str(folder.data)]
    printed = run_program(["prepare-data", *arguments], folder.log("prepare-data"))
    for line in printed.splitlines():
        if line.startswith(("documents", "tokens  ", "bytes")):
            say(line)


def training_flags(size: Size, folder: Folder) -> list[str]:
    """Returns Megatron's flags: a small model like Mixtral, the data, the checkpoints."""
    flags = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    values = {
        "num-layers": size.layers,
        "hidden-size": size.hidden_size,
        "ffn-hidden-size": 2 * size.hidden_size,
        "num-attention-heads": 4,
        "seq-length": size.seq_length,
        "max-position-embeddings": size.seq_length,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "num-experts": EXPERTS,
        "moe-router-topk": 2,
        "moe-router-load-balancing-type": "aux_loss",
        "moe-aux-loss-coeff": 1e-3,
        "moe-token-dispatcher-type": "alltoall",
        "expert-model-parallel-size": NODES,
        # Three times the slots that the experts need.
        "resilient-slots-per-rank": 3 * EXPERTS // NODES,
        "resilient-min-replicas": 2,
        "resilient-rebalance-interval": size.saved_step // 4,
        "resilient-check-replicas-interval": size.saved_step // 4,
        "micro-batch-size": 2,
        "global-batch-size": 2 * NODES,
        "train-iters": size.steps + size.last_steps,
        "lr": 3e-3,
        "min-lr": 1e-4,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": size.steps // 20,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "data-path": folder.data,
        "split": "97,3,0",
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": folder.data.with_suffix(".model"),
        "save": folder.checkpoints,
        "load": folder.checkpoints,
        "resilient-checkpoint-format": "experts",
        "eval-interval": size.evaluation_interval_steps,
        "eval-iters": 8,
        "log-interval": 10,
    }
    for name, value in values.items():
        flags += [f"--{name}", str(value)]
    return flags


def train_until_killed(size: Size, folder: Folder) -> None:
    """Starts training; one node is killed, and some steps after a checkpoint all are."""
    heading(
        f"Training: {NODES} nodes, EP {NODES}, {EXPERTS} experts, top-2, {size.layers} layers, "
        f"hidden {size.hidden_size}"
    )
    log = folder.log("train")
    flags = ["--save-interval", str(size.saved_step)]
    with console.status("") as status, start(size, folder, log, flags) as job:
        status.update(f"starting {NODES} nodes")
        for event in job.follow():
            show(event, size, status)
            if event["event"] != "step" or event.get("replayed"):
                continue
            if event["step"] == size.node_killed_step:
                say(f"SIGKILL to {LOST_NODE}")
                job.kill_node(LOST_NODE)
            if event["step"] == size.killed_step:
                say(f"SIGKILL to {job.kill()} nodes, as if the power had failed")
                return
    raise DemoError(f"training ended before step {size.killed_step}", log)


def resume(size: Size, folder: Folder) -> None:
    """Starts the same command again: it goes on from the checkpoint, and saves in parts."""
    heading(
        f"Resuming from the checkpoint of step {size.saved_step}; saves are partial from now on"
    )
    follow_to_the_end(size, folder, "resume", ["--exit-interval", str(size.steps)])


def resume_from_damage(size: Size, folder: Folder) -> None:
    """Damages an expert in the newest checkpoint, and starts the job once more."""
    manifest = newest_manifest(folder.checkpoints)
    file = next(file for file in manifest.files if file.expert and file.step == manifest.step)
    layer, expert = file.expert or (0, 0)
    heading(f"Damage: one bit of expert {expert} of layer {layer}, saved after step {file.step}")
    path = folder.checkpoints / file.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run_program(["checkpoint", "verify", str(folder.checkpoints)], folder.log("verify"), expected=1)
    follow_to_the_end(size, folder, "damage", [])


def newest_manifest(folder: Path) -> Manifest:
    """Returns what the newest checkpoint says of itself."""
    return read_manifest(manifest_path(folder, manifests(folder)[0]))


def follow_to_the_end(size: Size, folder: Folder, stage: str, flags: list[str]) -> None:
    """Starts a job that saves in parts, and follows it until it ends.

    Raises:
        DemoError: it failed.
    """
    log = folder.log(stage)
    partial = ["--save-interval", str(size.partial_steps), "--resilient-checkpoint-experts", "2"]
    with console.status("") as status, start(size, folder, log, [*partial, *flags]) as job:
        status.update(f"starting {NODES} nodes")
        for event in job.follow():
            show(event, size, status)
    if job.exit_code != 0:
        raise DemoError(f"training ended with status {job.exit_code}", log)


def start(size: Size, folder: Folder, log: Path, flags: list[str]) -> TrainingJob:
    """Starts the nodes."""
    say(f"command and output of the nodes: {log}")
    return TrainingJob(NODES, [*training_flags(size, folder), *flags], folder.run, log)


def show(event: Event, size: Size, status: Status) -> None:
    """Prints what an event says; most steps only change the status line."""
    if event["event"] == "step":
        line = (
            f"step {event['step']:4d} of {size.steps}   loss {event['loss'][MAIN_LOSS]:.4f}   "
            f"{event['tokens_per_second']:,.0f} tokens/s"
        )
        status.update(line)
        if event["step"] == 1 or event["step"] % size.shown_interval_steps == 0:
            say(line)
    elif event["event"] == "recovery":
        say(recovery_line(event))
    elif event["event"] == "checkpoint_saved":
        say(
            f"{Path(event['path']).stem} saved: {event['bytes'] / 1e6:.1f} MB, training waited "
            f"{1000 * event['stall_seconds']:.0f} ms"
        )
    elif event["event"] == "checkpoint_loaded":
        say(loaded_line(event))


def write_report(folder: Folder) -> Path:
    """Makes the page of the whole run."""
    heading("Report: loss, speed, expert load, members and recoveries on one page")
    run_program(["report", str(folder.run)], folder.log("report"))
    return folder.run / "report.html"


def show_result(result: Result, report: Path, seconds: float) -> None:
    """Prints the table at the end."""
    table = Table(show_header=False)
    for row in (*result.rows(), ("minutes", f"{seconds / 60:.1f}"), ("report", str(report))):
        table.add_row(*row)
    console.print()
    console.print(table)


def run_program(arguments: Sequence[str], log: Path, expected: int = 0) -> str:
    """Runs `megatron-resilient` with `arguments`; returns what it printed on stdout.

    Raises:
        DemoError: it ended with another status than expected.
    """
    say("$ " + shlex.join(["megatron-resilient", *arguments]))
    command = [sys.executable, "-m", "megatron_resilient.cli", *arguments]
    with log.open("w+", encoding="utf-8") as output, console.status("working"):
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        if status != expected:
            raise DemoError(f"megatron-resilient {arguments[0]} ended with status {status}", log)
        output.seek(0)
        return output.read()


def heading(text: str) -> None:
    """Prints what begins now."""
    console.print(f"\n[bold]{text}[/bold]", soft_wrap=True)


def say(text: str) -> None:
    """Prints a line, as it is."""
    console.print(f"  {text}", markup=False, soft_wrap=True)


def demo(size: Size, folder: Folder) -> bool:
    """Runs all stages; returns whether the result is good.

    Raises:
        DemoError: a stage failed.
    """
    begin = time.monotonic()
    folder.begin()
    prepare_data(folder)
    train_until_killed(size, folder)
    resume(size, folder)
    resume_from_damage(size, folder)
    report = write_report(folder)
    result = Result.of(read_events(folder.run))
    show_result(result, report, time.monotonic() - begin)
    return result.good


def main() -> int:
    """Parses the command line and runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("demo_run"), help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one minute: it learns little")
    args = parser.parse_args()
    # Whoever ends the demo ends the nodes: SIGTERM unwinds the stack as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return 0 if demo(QUICK if args.quick else FULL, Folder(args.dir)) else 1
    except KeyboardInterrupt:
        say("stopped")
        return 128 + signal.SIGINT
    except DemoError as error:
        if error.log is not None:
            printed = error.log.read_text(encoding="utf-8", errors="replace").splitlines()
            console.print(
                *printed[-TAIL_LINES:], sep="\n", markup=False, soft_wrap=True, style="dim"
            )
        where = f" (the whole log: {error.log})" if error.log else ""
        print(f"demo: {error}{where}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
