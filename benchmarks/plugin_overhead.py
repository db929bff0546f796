"""Step time of Megatron's pretrain() with the plugin enabled against the same without it.

Both train the same model on 4 gloo ranks of this machine's CPU. Two sets of processes stay alive
and take turns: stock Megatron on the CPU group of patches alone (without it nothing runs here),
and the plugin with its features off, then with its defaults. Each turn gives the median time of
its steps past the warm-up; compared are the turns of one round. The order changes from round to
round. Losses of a round must be equal in every bit: the work is the same.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/plugin_overhead.py

Ends with status 1 if the plugin with its features off costs more than the bar.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.pretrain_pool import PretrainPool, Result

RANKS = 4
WARMUP_STEPS = 5
BAR = 1.02
FLAGS = {"expert_model_parallel_size": RANKS, "eval_iters": 0}
STOCK, OFF, DEFAULT = "stock", "plugin, features off", "plugin, defaults"


@dataclass(frozen=True)
class Turn:
    """One run of one system."""

    step_seconds: float  # median past the warm-up
    numbers: list[tuple[float, float]]  # (loss, gradient norm) of each step

    @classmethod
    def of(cls, result: Result) -> "Turn":
        """Takes the times of rank 0; the ranks wait for each other in every step."""
        ends = result.ok().answers[0]["end_seconds"]
        steps = [end - start for start, end in pairwise(ends)]
        return cls(statistics.median(steps[WARMUP_STEPS:]), result.numbers)


def measure(rounds: int, steps: int) -> list[dict[str, Turn]]:
    """Returns the turns of each round by system."""
    with (
        tempfile.TemporaryDirectory() as folder,
        PretrainPool(RANKS, plugin=False) as stock,
        PretrainPool(RANKS) as plugin,
    ):
        own = {"train_iters": steps, "resilient_run_dir": folder, **FLAGS}
        systems = {
            STOCK: lambda: stock.run(train_iters=steps, **FLAGS),
            OFF: lambda: plugin.run(**own, resilient_expert_load_interval=0),
            DEFAULT: lambda: plugin.run(**own),
        }
        names, measured = list(systems), []
        for number in track(range(rounds), "rounds", Console(stderr=True)):
            order = names[number % 3 :] + names[: number % 3]
            measured.append({name: Turn.of(systems[name]()) for name in order})
            assert len({str(turn.numbers) for turn in measured[-1].values()}) == 1, measured[-1]
    return measured


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="of each turn; default: %(default)s")
    args = parser.parse_args()
    measured = measure(args.rounds, args.steps)

    table = Table(
        title=f"{args.rounds} rounds, {args.steps - 1 - WARMUP_STEPS} steps each, {RANKS} ranks on "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}"
    )
    for column in ("system", "step (ms)", "to stock, median", "range"):
        table.add_column(column, justify="left" if column == "system" else "right")
    ratios = {}
    for name in (STOCK, OFF, DEFAULT):
        turns = [turns[name].step_seconds for turns in measured]
        quotients = [turns[name].step_seconds / turns[STOCK].step_seconds for turns in measured]
        ratios[name] = statistics.median(quotients)
        table.add_row(
            name,
            f"{1000 * statistics.median(turns):.1f}",
            f"{ratios[name]:.4f}",
            f"{min(quotients):.4f} to {max(quotients):.4f}",
        )
    Console().print(table)
    return 0 if ratios[OFF] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
