"""Trains the demo's model on one CUDA device, with the plugin and without, and compares.

    python tools/gpu_check.py [--device cpu] [--steps N] [--dir FOLDER] [--json]

All runs begin with the same weights, made on the CPU, and read the same text. Compared are losses:
of the device and the CPU, with the plugin and without it, of a resumed run, in bf16, and with
grouped GEMM where Transformer Engine is installed (with weights of its own). `--device cpu` goes
the same way without a GPU; there, what is compared must be equal in every bit.

Takes less than five minutes. Ends with a table, DIR/gpu_check.json, and status 0 if all is well.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demo import EXPERTS, FULL, Folder, training_flags
from rich.console import Console
from rich.table import Table

CASE_TIMEOUT_SECONDS = 150
TAIL_LINES = 30
WARMUP_STEPS = 5
LAST_STEPS = 5
# Kernels of two devices round differently, and a token whose two best experts are about as good
# then goes to another one: at first losses differ by rounding, later by a little more.
FIRST_LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 0.02
OTHER_NUMBERS_TOLERANCE = 0.05  # other precision, or other initial weights

# What a machine without Transformer Engine and Apex has, and a CPU.
LOCAL = (
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--num-workers", "0"),
    *("--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion", "--async-strategy", "mcore"),
)
GROUPED = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm", "--num-workers", "0")
BF16 = ("--bf16", "--use-distributed-optimizer")
SLOTS = ("--resilient-slots-per-rank", str(EXPERTS))  # our layer; one rank needs no replica
# Flags of the demo that concern its four ranks, its checkpoints and its evaluations. Its flags of
# the plugin go too: stock Megatron knows none of them.
OWN = {
    "--expert-model-parallel-size": "1",
    "--eval-iters": "0",
    "--log-interval": "100",
    "--save": None,
    "--load": None,
}


class CheckError(Exception):
    """A run did not come to its end."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: of the file with its result, and of its line in the table.
        plugin: whether the plugin is on.
        device: `cuda` or `cpu`.
        flags: beside those of the model.
    """

    name: str
    plugin: bool
    device: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What one run did.

    Attributes:
        case: which run it was.
        losses: of its steps.
        step_seconds: median past the warm-up.
        peak_memory_bytes: allocated on the device at most; None on the CPU.
        groups: patch groups in force.
        device_name: of the device.
    """

    case: Case
    losses: list[float]
    step_seconds: float
    peak_memory_bytes: int | None
    groups: list[str]
    device_name: str

    @property
    def last_loss(self) -> float:
        """Mean of the last steps."""
        return statistics.mean(self.losses[-LAST_STEPS:])


@dataclass(frozen=True)
class Comparison:
    """One thing that must hold.

    Attributes:
        what: in words.
        value: what was found.
        limit: what it may be at most.
    """

    what: str
    value: float
    limit: float

    @property
    def good(self) -> bool:
        """Whether it holds; NaN never does."""
        return self.value <= self.limit


class Check:
    """All runs of one check.

    Args:
        device: `cuda` or `cpu`.
        steps: of each run.
        folder: for data, checkpoints, results and logs.
        say: called with what is going on.
    """

    def __init__(self, device: str, steps: int, folder: Path, say: Any) -> None:
        self._device = device
        self._steps = steps
        self._folder = folder
        self._demo = Folder(folder)
        self._say = say

    def run(self) -> tuple[dict[str, Outcome], list[Comparison]]:
        """Prepares data and weights, runs all cases and compares them.

        Raises:
            CheckError: a run failed.
        """
        self._prepare_data()
        seed = self._folder / "seed"
        save = ("--save", str(seed), "--save-interval", "1")
        self._train(Case("seed", True, "cpu", (*LOCAL, *save)), steps=1)
        outcomes = {case.name: self._train(case) for case in self._cases(seed)}
        return outcomes, list(self._compare(outcomes))

    def _cases(self, seed: Path) -> Iterator[Case]:
        half = str(self._steps // 2)
        start = ("--load", str(seed), "--finetune")
        saved = str(self._folder / "saved")
        yield Case("cpu", True, "cpu", (*LOCAL, *start))
        yield Case("fp32 off", False, self._device, (*LOCAL, *start))
        save = ("--save", saved, "--save-interval", half)
        yield Case("fp32 on", True, self._device, (*LOCAL, *start, *save))
        resume = ("--load", saved, "--ckpt-step", half)
        yield Case("fp32 resumed", True, self._device, (*LOCAL, *resume))
        yield Case("slots", True, self._device, (*LOCAL, *SLOTS, *start))
        yield Case("bf16 off", False, self._device, (*LOCAL, *BF16, *start))
        yield Case("bf16 on", True, self._device, (*LOCAL, *BF16, *start))
        if self._device == "cuda" and importlib.util.find_spec("transformer_engine"):
            yield Case("grouped off", False, self._device, (*GROUPED, *BF16))
            yield Case("grouped on", True, self._device, (*GROUPED, *BF16))

    def _compare(self, outcomes: dict[str, Outcome]) -> Iterator[Comparison]:
        same = 0.0 if self._device == "cpu" else LOSS_TOLERANCE
        cpu, fp32 = outcomes["cpu"], outcomes["fp32 on"]
        first = _difference(fp32.losses[:1], cpu.losses[:1])
        yield Comparison("first loss: device and CPU", first, min(FIRST_LOSS_TOLERANCE, same))
        yield Comparison("losses: device and CPU", _difference(fp32.losses, cpu.losses), same)
        resumed = _difference(outcomes["fp32 resumed"].losses, fp32.losses[self._steps // 2 :])
        yield Comparison("losses: resumed and not", resumed, same)
        slots = _difference(outcomes["slots"].losses, fp32.losses)
        yield Comparison("losses: slots and stock experts", slots, same)
        kinds = [kind for kind in ("fp32", "bf16", "grouped") if f"{kind} on" in outcomes]
        for kind in kinds:
            on, off = outcomes[f"{kind} on"], outcomes[f"{kind} off"]
            difference = _difference(on.losses, off.losses)
            yield Comparison(f"losses: plugin on and off, {kind}", difference, same)
        for kind in kinds[1:]:
            last = _difference([outcomes[f"{kind} on"].last_loss], [cpu.last_loss])
            yield Comparison(f"last losses: {kind} and CPU", last, OTHER_NUMBERS_TOLERANCE)
        for name, outcome in outcomes.items():
            if name != "fp32 resumed":
                fall = outcome.last_loss / outcome.losses[0]
                yield Comparison(f"last loss / first loss: {name}", fall, 0.95)
        for name, outcome in outcomes.items():
            wrong = set(outcome.groups) ^ set(_groups(outcome.case))
            yield Comparison(f"patch groups amiss: {name}", len(wrong), 0)

    def _prepare_data(self) -> None:
        self._say("preparing text")
        self._demo.data.parent.mkdir(parents=True, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        inputs = [str(library / name) for name in ("asyncio", "email", "importlib", "json")]
        command = [sys.executable, "-m", "megatron_resilient.cli", "prepare-data"]
        command += ["--input", *inputs, "--glob", "*.py", "--train-tokenizer", "2048"]
        command += ["--append-eod", "--output", str(self._demo.data), "--overwrite"]
        self._run(command, self._folder / "prepare-data.log")

    def _train(self, case: Case, steps: int | None = None) -> Outcome:
        plugin = "plugin on" if case.plugin else "plugin off"
        self._say(f"training: {case.name} ({case.device}, {plugin})")
        steps = steps or self._steps
        flags = _model_flags(training_flags(replace(FULL, steps=steps, last_steps=0), self._demo))
        flags += [*case.flags, "--distributed-backend"]
        flags.append("gloo" if case.device == "cpu" else "nccl")
        file_name = case.name.replace(" ", "-")
        if case.plugin:
            run_dir = str(self._folder / "runs" / file_name)
            flags += ["--resilient-device", case.device, "--resilient-run-dir", run_dir]
        result = self._folder / f"{file_name}.json"
        result.unlink(missing_ok=True)
        program = str(Path(__file__).with_name("gpu_case.py"))
        arguments = ["on" if case.plugin else "off", case.device, str(result), *flags]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if case.device == "cpu" else {}
        self._run([sys.executable, program, *arguments], self._folder / f"{file_name}.log", hidden)
        seen = json.loads(result.read_text(encoding="utf-8"))
        seconds = seen.pop("step_seconds")
        median = statistics.median(seconds[WARMUP_STEPS:] or seconds)
        return Outcome(case=case, step_seconds=median, **seen)

    def _run(self, command: Sequence[str], log: Path, extra: dict[str, str] | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w", encoding="utf-8") as output:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment | (extra or {}),
                    timeout=CASE_TIMEOUT_SECONDS,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"none after {CASE_TIMEOUT_SECONDS} s"
        if status != 0:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            raise CheckError(
                "\n".join([*tail, f"{log.stem} ended with status {status}; see {log}"])
            )


def _model_flags(flags: Sequence[str]) -> list[str]:
    """Replaces the values of the flags in OWN; drops those without one, and the plugin's."""
    kept = list(flags)
    own = OWN | {flag: None for flag in flags if flag.startswith("--resilient-")}
    for flag, value in own.items():
        at = kept.index(flag)
        kept[at : at + 2] = [flag, value] if value is not None else []
    return kept


def _groups(case: Case) -> tuple[str, ...]:
    cpu = ("cpu",) if case.device == "cpu" else ()
    return (*cpu, "fixes", "core") if case.plugin else cpu


def _difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite if one is longer or not finite."""
    if len(a) != len(b):
        return float("inf")
    differences = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("inf")


def document(
    outcomes: dict[str, Outcome], comparisons: Sequence[Comparison], seconds: float
) -> dict[str, Any]:
    """Returns all results as one JSON document."""
    return {
        "ok": all(comparison.good for comparison in comparisons),
        "seconds": seconds,
        "tokens_per_step": FULL.seq_length * 8,
        "runs": {
            name: {
                "device": outcome.device_name,
                "plugin": outcome.case.plugin,
                "patch_groups": outcome.groups,
                "losses": outcome.losses,
                "step_seconds": outcome.step_seconds,
                "peak_memory_bytes": outcome.peak_memory_bytes,
            }
            for name, outcome in outcomes.items()
        },
        "comparisons": [
            {"what": c.what, "value": c.value, "limit": c.limit, "good": c.good}
            for c in comparisons
        ],
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints the runs, then what must hold."""
    runs = Table()
    for column in ("run", "device", "first loss", "last loss", "step ms", "memory MiB"):
        runs.add_column(column, justify="left" if column in ("run", "device") else "right")
    for name, run in result["runs"].items():
        peak = run["peak_memory_bytes"]
        runs.add_row(
            name,
            run["device"],
            f"{run['losses'][0]:.4f}",
            f"{run['losses'][-1]:.4f}",
            f"{run['step_seconds'] * 1e3:.1f}",
            "-" if peak is None else f"{peak / 2**20:.0f}",
        )
    comparisons = Table()
    for column in ("what must hold", "found", "at most", ""):
        comparisons.add_column(column)
    for each in result["comparisons"]:
        verdict = "[green]ok[/]" if each["good"] else "[red]NO[/]"
        comparisons.add_row(each["what"], f"{each['value']:.3g}", f"{each['limit']:g}", verdict)
    console.print(runs, comparisons)
    for kind in ("fp32", "bf16", "grouped"):
        if f"{kind} on" in result["runs"]:
            on, off = (result["runs"][f"{kind} {state}"]["step_seconds"] for state in ("on", "off"))
            console.print(f"step time with the plugin over without, {kind}: {on / off:.3f}")
    if "grouped on" not in result["runs"]:
        console.print("grouped GEMM was not run: it needs Transformer Engine and a GPU")
    console.print(f"{result['seconds']:.0f} s")


def main() -> int:
    """Parses the command line and runs the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="of each run, at least 10")
    parser.add_argument("--dir", type=Path, help="for data, results and logs; default: temporary")
    parser.add_argument("--json", action="store_true", help="print the JSON document, no table")
    args = parser.parse_args()
    if args.steps < 2 * LAST_STEPS:
        parser.error(f"--steps {args.steps}: at least {2 * LAST_STEPS} are needed")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device; --device cpu goes the same way without one")
    console = Console(highlight=False, stderr=args.json)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as temporary:
        folder = args.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        check = Check(args.device, args.steps, folder, lambda text: console.print(text))
        try:
            outcomes, comparisons = check.run()
        except CheckError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 1
        result = document(outcomes, comparisons, time.monotonic() - begin)
        text = json.dumps(result, indent=2)
        (folder / "gpu_check.json").write_text(text + "\n", encoding="utf-8")
    if args.json:
        print(text)
    else:
        show(console, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
