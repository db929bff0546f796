"""What partial-experts checkpoints do to the loss, when faults strike.

A small MoE model learns the sources of Python's standard library. After some saves it is restarted
from the newest one, as after a fault: with partial saves most experts are older than the rest then.
(Steps after that save are done again with the same data, whatever was saved, so they are left out.)
Full saves, K=1, 2 and 4 of 8 experts in turn, K=1 by load, and K=1 with all fp32 weights, so that
only moments grow old; each with the same seeds and data as a run without faults, with which it is
compared step by step. Dynamic-K is off: K stays.

after: training loss of the 10 steps after a restart, above the same steps without faults.
end: validation loss at the end, above that without faults.
lost: tokens whose updates were lost, as the run says, of all that were routed (PLT).

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/pec_quality.py

Ends with status 1 if full saves are not the run without faults in every bit.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table
from scipy.stats import t

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_resilient.commands.flag_types import count
from megatron_resilient.telemetry import read_events
from megatron_resilient.telemetry.summary import MAIN_LOSS
from tests.support.pretrain_pool import PretrainPool

EXPERTS, TOP_K, LAYERS = 8, 2, 2
SAVE_INTERVAL = 5
AFTER_STEPS = 10
MODEL = {
    "num_layers": LAYERS,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "num_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "lr": 3e-3,
    "lr_decay_style": "cosine",
    "mock_data": None,
    "tokenizer_type": "SentencePieceTokenizer",
    "vocab_size": None,
    "split": "95,5,0",
    "eval_iters": 16,
    "save_interval": SAVE_INTERVAL,
    "override_opt_param_scheduler": True,
    "resilient_checkpoint_format": "experts",
    "resilient_checkpoint_lost_tokens": 0,
}
FREE, FULL = "no faults", "full"
K1 = {"resilient_checkpoint_experts": 1}
CASES = {
    FREE: {},
    FULL: {},
    "K=4": {"resilient_checkpoint_experts": 4},
    "K=2": {"resilient_checkpoint_experts": 2},
    "K=1": K1,
    "K=1, by load": K1 | {"resilient_checkpoint_selection": "load-aware"},
    "K=1, all masters": K1 | {"resilient_checkpoint_masters": "all"},
}
LOST = re.compile(r"the updates of ([\d,]+) token-expert pairs are lost")
console = Console(width=110, highlight=False)


@dataclass(frozen=True)
class Run:
    """One case with one seed.

    Attributes:
        losses: of every step.
        end: validation loss at the end.
        lost: token-expert pairs, over all restarts.
    """

    losses: list[float]
    end: float
    lost: int


def prepare(folder: Path) -> Path:
    """Makes a dataset and a tokenizer; returns their prefix."""
    prefix = folder / "stdlib"
    command = [sys.executable, "-m", "megatron_resilient.cli", "prepare-data"]
    command += ["--input", sysconfig.get_path("stdlib"), "--glob", "*.py"]
    for name in ("test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "site-packages"):
        command += ["--exclude", name]
    command += ["--train-tokenizer", "1024", "--append-eod", "--output", str(prefix)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return prefix


def run(pool: PretrainPool, data: Path, name: str, seed: int, args: argparse.Namespace) -> Run:
    """Trains to the end, with a restart at each fault."""
    flags = MODEL | CASES[name] | {"seed": seed, "lr_decay_iters": args.steps}
    flags |= {"data_path": data, "tokenizer_model": data.with_suffix(".model")}
    faults = [] if name == FREE else args.faults
    losses, lost = [], 0
    with tempfile.TemporaryDirectory(prefix="pec-quality-") as folder:
        for stop in (*faults, args.steps):
            part = pool.run(
                **flags,
                train_iters=stop,
                eval_interval=args.steps,
                save=folder,
                load=folder if losses else None,
                resilient_run_dir=folder,
                timeout_seconds=600,
            ).ok()
            losses += part.losses
            lost += sum(int(found.replace(",", "")) for found in LOST.findall(part.outputs[0]))
        events = read_events(Path(folder))
        last = [event for event in events if event["event"] == "evaluation"][-1]
    assert len(losses) == args.steps, (name, len(losses))
    return Run(losses, last["loss"][MAIN_LOSS], lost)


def measure(data: Path, args: argparse.Namespace) -> dict[str, list[Run]]:
    """Returns the runs of every case, by seed; two at a time."""
    with PretrainPool(1) as one, PretrainPool(1) as other:
        free: SimpleQueue[PretrainPool] = SimpleQueue()
        free.put(one)
        free.put(other)

        def job(name: str, seed: int) -> Run:
            pool = free.get()
            try:
                return run(pool, data, name, seed, args)
            finally:
                free.put(pool)

        with ThreadPoolExecutor(2) as threads:
            jobs = {
                name: [threads.submit(job, name, 1000 + n) for n in range(args.seeds)]
                for name in CASES
            }
            return {name: [each.result() for each in runs] for name, runs in jobs.items()}


def above(runs: list[Run], free: list[Run], faults: list[int]) -> tuple[list[float], list[float]]:
    """Returns, by seed, how far losses are above those without faults: after restarts, at end."""
    steps = [step for fault in faults for step in range(fault, fault + AFTER_STEPS)]
    after = [
        statistics.fmean(own.losses[step] - base.losses[step] for step in steps)
        for own, base in zip(runs, free, strict=True)
    ]
    return after, [own.end - base.end for own, base in zip(runs, free, strict=True)]


def spread(values: list[float]) -> str:
    """Returns the mean and the standard deviation over seeds as text."""
    return f"{statistics.fmean(values):+.4f} ± {statistics.stdev(values):.4f}"


def read(name: str, values: list[float], noise: float) -> str:
    """Says what the differences of a case show, against what seeds alone make."""
    mean = statistics.fmean(values)
    # 95 % interval of the mean of so many seeds.
    half = statistics.stdev(values) / len(values) ** 0.5 * float(t.ppf(0.975, len(values) - 1))
    seen = "a difference" if abs(mean) > half + 1e-12 else "no difference that can be told"
    return (
        f"{name}: {seen} at the end, {mean:+.4f} (95 %: ± {half:.4f}), "
        f"{abs(mean) / noise:.2f} times what another seed makes"
    )


def main() -> int:
    """Measures, prints a table and what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="at least 2; default: %(default)s")
    parser.add_argument("--steps", type=count(), default=200, help="default: %(default)s")
    parser.add_argument(
        "--faults",
        type=int,
        nargs="+",
        default=[65, 130],
        help=f"steps of restarts, multiples of {SAVE_INTERVAL}; default: %(default)s",
    )
    args = parser.parse_args()
    if args.seeds < 2 or any(fault % SAVE_INTERVAL for fault in args.faults):
        parser.error(f"two seeds at least, and faults at multiples of {SAVE_INTERVAL}")
    with tempfile.TemporaryDirectory(prefix="pec-quality-") as folder:
        found = measure(prepare(Path(folder)), args)
    free = found[FREE]
    routed = args.steps * MODEL["global_batch_size"] * MODEL["seq_length"] * TOP_K * LAYERS
    noise = statistics.stdev(run.end for run in free)
    table = Table(
        title=f"{args.seeds} seeds, {args.steps} steps, restarts after {args.faults}, a save every "
        f"{SAVE_INTERVAL}; mean ± standard deviation over seeds"
    )
    table.add_column("saves")
    for column in ("lost tokens", "after restarts", "at the end", "loss at the end"):
        table.add_column(column, justify="right")
    ends = {}
    for name, runs in found.items():
        after, ends[name] = above(runs, free, args.faults)
        losses = [run.end for run in runs]
        table.add_row(
            name,
            f"{statistics.fmean(run.lost for run in runs) / routed:.2%}",
            "" if name == FREE else spread(after),
            "" if name == FREE else spread(ends[name]),
            f"{statistics.fmean(losses):.4f} ± {statistics.stdev(losses):.4f}",
        )
    console.print(table)
    exact = all(own.losses == base.losses for own, base in zip(found[FULL], free, strict=True))
    console.print(f"full saves: losses {'equal' if exact else 'NOT equal'} in every bit")
    for name in list(CASES)[2:]:
        console.print(read(name, ends[name], noise), soft_wrap=True)
    console.print(
        f"Another seed alone moves the loss at the end by {noise:.4f} (standard deviation). A "
        "model of this size, trained for minutes, says how much a restart sets back, and nothing "
        "about what is left of it after a long training, or about a large model's experts.",
        soft_wrap=True,
    )
    console.print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}", style="dim")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
