"""What reducing dense gradients costs: at the end, by Megatron's own overlap, and in slices.

The same model is trained by turns in the same processes, on 4 gloo ranks of this machine's CPU:
gradients reduced after the backward pass; bucket by bucket while it runs (--overlap-grad-reduce,
one bucket about a layer); and in slices, beside the MoE layers, beside the dense work after them,
and both. Slices are of equal sizes that add up to all dense gradients. Of each turn the median over
its steps counts, as in plugin_overhead.py; compared are the turns of one round.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/gradient_slices.py

Windows are called by hooks around Megatron's own layers, which are not cut into chunks: a slice
shares the link with the tokens of its layer. Where ranks outnumber the cores nothing is idle while
gradients travel, and nothing is to be gained by any of them. It prints what is. It ends with status
1 only if losses differ by more than the order of sums makes them.
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
from tests.support.pretrain_pool import SMALL_MODEL, PretrainPool

RANKS = 4
PROBE = "tests.support.slices_probe"
END, MEGATRON = "at the end", "Megatron's overlap"
IN_MOE, DENSE, BOTH = "slices in MoE layers", "slices beside dense work", "slices in both"
SYSTEMS = (END, MEGATRON, IN_MOE, DENSE, BOTH)
TOLERANCE = 1e-4  # of losses; sums over four ranks are made in another order


def measure(
    rounds: int, steps: int, distopt: bool, pool: PretrainPool, folder: str
) -> tuple[list[dict[str, Turn]], dict[str, float]]:
    """Measures all systems.

    Args:
        rounds: how often each runs.
        steps: of each run.
        distopt: whether the optimizer is distributed: reduce-scatters instead of all-reduces.
        pool: its ranks train.
        folder: for the records of the runs.

    Returns:
        The turns of each round by system, and the share of the dense gradients that each system of
        slices sent before the end.
    """
    layers = SMALL_MODEL["num-layers"]
    flags = {
        "train_iters": steps,
        "expert_model_parallel_size": RANKS,
        "resilient_expert_load_interval": 0,
        "resilient_run_dir": folder,
        "inspect": f"{PROBE}:weights_and_bytes",
        "use_distributed_optimizer": distopt,
    }
    pool.call(f"{PROBE}:restore")
    dense = pool.run(**(flags | {"train_iters": 1})).ok().inspected[0][2]
    share = -(-dense // layers)
    overlap = {"overlap_grad_reduce": True, "ddp_bucket_size": share // 4}
    windows = {
        IN_MOE: {"in_moe": share},
        DENSE: {"beside_dense": share},
        BOTH: {"in_moe": share // 2, "beside_dense": share // 2},
    }
    measured, sent = [], {}
    for number in track(range(rounds), "rounds", console=Console(stderr=True)):
        turns = {}
        first = number % len(SYSTEMS)
        for name in SYSTEMS[first:] + SYSTEMS[:first]:
            pool.call(f"{PROBE}:restore")
            if name in windows:
                pool.call(f"{PROBE}:slice_gradients", **windows[name])
            result = pool.run(**flags, **(overlap if name == MEGATRON else {})).ok()
            turns[name] = Turn.of(result)
            if name in windows:
                sent[name] = result.inspected[0][1] / dense
        measured.append(turns)
    pool.call(f"{PROBE}:restore")
    return measured, sent


def main() -> int:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count(), default=5, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=count(), default=20, help="of each turn; default: %(default)s"
    )
    parser.add_argument(
        "--use-distributed-optimizer", action="store_true", help="reduce-scatters, not all-reduces"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, PretrainPool(RANKS) as pool:
        measured, sent = measure(
            args.rounds, args.steps, args.use_distributed_optimizer, pool, folder
        )

    table = Table(
        title=f"a step: {args.rounds} rounds of {args.steps - 1 - WARMUP_STEPS} steps, {RANKS} "
        f"ranks, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}"
    )
    table.add_column("dense gradients are reduced")
    for column in ("early", "wall ms", f"to {END}", "range", "to Megatron's", "range"):
        table.add_column(column, justify="right")
    for name in SYSTEMS:
        to_end, to_megatron = (
            compared([(r[name].wall_seconds, r[peer].wall_seconds) for r in measured])
            for peer in (END, MEGATRON)
        )
        early = f"{sent[name]:.0%}" if name in sent else ""
        table.add_row(name, early, *to_end, *to_megatron[1:])
    Console(width=110).print(table)
    worst = max(
        abs(own[0] - end[0]) / end[0]
        for turns in measured
        for name in SYSTEMS
        for own, end in zip(turns[name].numbers, turns[END].numbers, strict=True)
    )
    print(f"losses differ by at most {worst:.1e} of themselves")
    return 0 if worst < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
