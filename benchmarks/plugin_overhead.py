"""What the plugin costs: a step of Megatron's pretrain() with it against the same without it.

Both train the same model on 4 gloo ranks of this machine's CPU, by turns in the same processes:
stock Megatron on the CPU group of patches alone (without it nothing runs here), and the plugin with
its features off, then with its defaults. A turn gives the median over its steps past the warm-up,
from the end of one step to the end of the next: of the wall-clock time, and of the processor time
of all ranks, which other programs on the machine disturb less. Compared are the turns of one round;
the order changes from round to round. Losses and gradient norms of a round must be equal in every
bit: the work is the same.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/plugin_overhead.py

Ends with status 1 if a step with the plugin, its features off, takes more than 2 % longer.
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
from megatron_resilient.patches import REGISTRY

from megatron_resilient.commands.flag_types import count
from tests.support.pretrain_pool import PretrainPool, Result

RANKS = 4
WARMUP_STEPS = 5
BAR = 1.02
STOCK, OFF, DEFAULT = "stock", "plugin, features off", "plugin, defaults"


@dataclass(frozen=True)
class Turn:
    """One run of one system.

    Attributes:
        wall_seconds: of a step, on rank 0; the ranks wait for each other in every step.
        cpu_seconds: of a step, all ranks together.
        numbers: (loss, gradient norm) of each step.
    """

    wall_seconds: float
    cpu_seconds: float
    numbers: list[tuple[float, float]]

    @classmethod
    def of(cls, result: Result) -> "Turn":
        """Takes the medians of a run."""
        answers = result.ok().answers
        cpu_of_all = [
            sum(ends) for ends in zip(*(a["end_cpu_seconds"] for a in answers), strict=True)
        ]
        return cls(median_step(answers[0]["end_seconds"]), median_step(cpu_of_all), result.numbers)


def median_step(ends: list[float]) -> float:
    """Returns the median difference of neighbours past the warm-up."""
    return statistics.median(end - start for start, end in list(pairwise(ends))[WARMUP_STEPS:])


def measure(rounds: int, steps: int) -> list[dict[str, Turn]]:
    """Returns the turns of each round by system."""
    # Without the one that stays, stock cannot start: the wheel lacks a Makefile.
    plugin = {patch.id for patch in REGISTRY.patches if patch.group != "cpu"}
    plugin -= {"fixes.compile-helpers"}
    with tempfile.TemporaryDirectory() as folder, PretrainPool(RANKS) as pool:
        flags = {"train_iters": steps, "expert_model_parallel_size": RANKS}
        own = {**flags, "resilient_run_dir": folder}
        systems = {
            STOCK: lambda: pool.run(without=plugin, **flags),
            OFF: lambda: pool.run(resilient_expert_load_interval=0, **own),
            DEFAULT: lambda: pool.run(**own),
        }
        names, measured = list(systems), []
        for number in track(range(rounds), "rounds", console=Console(stderr=True)):
            order = names[number % 3 :] + names[: number % 3]
            measured.append({name: Turn.of(systems[name]()) for name in order})
            assert len({str(turn.numbers) for turn in measured[-1].values()}) == 1, measured[-1]
    return measured


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count(), default=9, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=count(), default=30, help="of each turn; default: %(default)s"
    )
    args = parser.parse_args()
    measured = measure(args.rounds, args.steps)

    table = Table(
        title=f"{args.rounds} rounds of {args.steps - 1 - WARMUP_STEPS} steps, {RANKS} ranks, "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}"
    )
    table.add_column("system")
    for column in ("wall ms", "to stock", "range", "CPU ms", "to stock", "range"):
        table.add_column(column, justify="right")
    for name in (STOCK, OFF, DEFAULT):
        cells = []
        for what in ("wall_seconds", "cpu_seconds"):
            cells += compared([(getattr(r[name], what), getattr(r[STOCK], what)) for r in measured])
        table.add_row(name, *cells)
    Console(width=100).print(table)
    wall = statistics.median(r[OFF].wall_seconds / r[STOCK].wall_seconds for r in measured)
    return 0 if wall <= BAR else 1


def compared(pairs: list[tuple[float, float]]) -> list[str]:
    """Returns the median of the first, and the median and the range of the ratios, as text."""
    ratios = [own / stock for own, stock in pairs]
    return [
        f"{1000 * statistics.median(own for own, _ in pairs):.1f}",
        f"{statistics.median(ratios):.4f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
