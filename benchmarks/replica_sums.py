"""What summing the gradients of replicas costs: after the backward pass, and during it.

Three systems train the same model on 4 gloo ranks of this machine's CPU, by turns in the same
processes: without replicas, with two slots per expert whose gradients are summed when all of them
are final, and with the same summed layer by layer while the backward pass runs. Experts stay where
they are. Of each turn the medians over its steps count, as in plugin_overhead.py. The two sums must
give the same losses and gradient norms in every bit.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/replica_sums.py

Where ranks outnumber the cores nothing is idle while gradients travel, and nothing is to be gained.
It prints what is; it ends with status 1 only if the bits differ.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.plugin_overhead import WARMUP_STEPS, Turn, compared
from megatron_resilient.commands.flag_types import count
from tests.support.pretrain_pool import PretrainPool

RANKS = 4
PROBE = "tests.support.replica_probe"
NONE, AFTER, DURING = "no replicas", "summed after", "summed during"


def measure(rounds: int, steps: int) -> list[dict[str, Turn]]:
    """Returns the turns of each round by system."""
    flags = {
        "train_iters": steps,
        "expert_model_parallel_size": RANKS,
        "resilient_expert_load_interval": 0,
    }
    slots = {
        "resilient_slots_per_rank": 4,
        "resilient_ranks_per_node": 1,
        "resilient_rebalance_interval": 0,
    }
    systems = {NONE: ({}, True), AFTER: (slots, False), DURING: (slots, True)}
    names, measured = list(systems), []
    with tempfile.TemporaryDirectory() as folder, PretrainPool(RANKS) as pool:
        for number in track(range(rounds), "rounds", console=Console(stderr=True)):
            turns = {}
            for name in names[number % 3 :] + names[: number % 3]:
                own, early = systems[name]
                pool.call(f"{PROBE}:sum_replicas", early=early)
                turns[name] = Turn.of(pool.run(**flags, **own, resilient_run_dir=folder))
            measured.append(turns)
    return measured


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count(), default=6, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=count(), default=20, help="of each turn; default: %(default)s"
    )
    args = parser.parse_args()
    measured = measure(args.rounds, args.steps)

    table = Table(
        title=f"a step: {args.rounds} rounds of {args.steps - 1 - WARMUP_STEPS} steps, {RANKS} "
        f"ranks, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}"
    )
    table.add_column("gradients of replicas")
    for column in ("wall ms", "ratio", "range", "CPU ms", "ratio", "range"):
        table.add_column(column, justify="right")
    for own, peer in ((NONE, NONE), (AFTER, NONE), (DURING, NONE), (DURING, AFTER)):
        cells = []
        for what in ("wall_seconds", "cpu_seconds"):
            cells += compared([(getattr(r[own], what), getattr(r[peer], what)) for r in measured])
        table.add_row(f"{own} / {peer}", *cells)
    Console(width=110).print(table)
    same = all(turns[AFTER].numbers == turns[DURING].numbers for turns in measured)
    print(f"losses and gradient norms of the two sums are {'equal' if same else 'NOT EQUAL'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
