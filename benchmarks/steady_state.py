"""What being recoverable costs while nothing fails.

4 single-rank nodes train under `megatron-resilient run`; in alternating blocks of steps their
processes do all that makes them recoverable, or nothing of it (steady_state_steps.py says what).
Neighbouring blocks are compared: wall-clock time of a step, and processor time of all ranks, which
other programs on the machine disturb less. Agents, launcher and coordinator run on in both; their
processor time is added. Once with Megatron's plain optimizer, once with the distributed one and its
mirror.

    .venv/bin/python benchmarks/steady_state.py

The model is small: what is paid once a step weighs more than it would in a large one.
Ends with status 1 if the median over pairs of blocks is more than 2 % of a step.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.steady_state_steps import (
    BLOCK_STEPS,
    WARMUP_STEPS,
    is_first_of_block,
    is_on,
)
from megatron_resilient.commands.flag_types import count
from tests.support.pretrain_pool import flags
from tools.training_job import TrainingJob

NODES = 4
BAR = 1.02
SCRIPT = Path(__file__).with_name("steady_state_steps.py")
# A watchdog is silent while its block is off.
LIMITS = dict.fromkeys(("heartbeat", "fence", "rejoin", "coordinator", "leave"), "600")
CASES = {
    "plain optimizer": {},
    "distributed optimizer, mirror": {"use_distributed_optimizer": True},
}


@dataclass(frozen=True)
class Cost:
    """What one case showed.

    Attributes:
        wall: (seconds of a step off, on) of each pair of blocks, on rank 0.
        cpu: the same of the processor time of all ranks.
        parts: processor seconds of a step, mean over ranks, by what they are for.
        outside: processor seconds of a step of agents, launcher and coordinator.
        waits: fenced waits of a rank in a step.
    """

    wall: list[tuple[float, float]]
    cpu: list[tuple[float, float]]
    parts: dict[str, float]
    outside: float
    waits: float


def measure(case: dict, pairs: int, folder: Path) -> Cost:
    """Runs one case."""
    steps = WARMUP_STEPS + 2 * BLOCK_STEPS * pairs
    own = flags(
        train_iters=steps,
        expert_model_parallel_size=NODES,
        resilient_slots_per_rank=4,
        resilient_expert_load_interval=0,
        **case,
    )
    launcher = [
        *(sys.executable, "-m", "megatron_resilient.cli", "run", "--emulate-nodes", str(NODES)),
        *(part for name, limit in LIMITS.items() for part in (f"--{name}-timeout", limit)),
        *("--hang-timeout", "0", "--join-window", "1"),
    ]
    run_dir, log = folder / "run", folder / "log"
    with TrainingJob(NODES, own, run_dir, log, launcher, SCRIPT) as job:
        outside: dict[int, float] = {}
        for event in job.follow():
            if event["event"] == "step" and event["step"] in (WARMUP_STEPS, steps - 1):
                sign = -1 if event["step"] == WARMUP_STEPS else 1
                for pid, seconds in cpu_outside(job.pid).items():
                    outside[pid] = outside.get(pid, 0.0) + sign * seconds
        if job.exit_code:
            raise SystemExit(log.read_text(encoding="utf-8", errors="replace")[-3000:])
    ranks = [json.loads((run_dir / f"steps-{rank}.json").read_text()) for rank in range(NODES)]
    cpu = [sum(ends) for ends in zip(*(rank["end_cpu_seconds"] for rank in ranks), strict=True)]
    return Cost(
        wall=in_pairs(ranks[0]["end_seconds"]),
        cpu=in_pairs(cpu),
        parts={
            name: statistics.fmean(rank["parts"][name] for rank in ranks)
            for name in ranks[0]["parts"]
        },
        outside=sum(outside.values()) / (steps - 1 - WARMUP_STEPS),
        waits=statistics.fmean(rank["waits"] for rank in ranks),
    )


def cpu_outside(launcher: int) -> dict[int, float]:
    """Returns the processor seconds of the launcher, its agents and the coordinator, by pid."""
    processes = [psutil.Process(launcher), *psutil.Process(launcher).children()]
    return {process.pid: sum(process.cpu_times()[:2]) for process in processes}


def in_pairs(ends: list[float]) -> list[tuple[float, float]]:
    """Returns (off, on), mean seconds of a step in two blocks that follow each other."""
    blocks: list[list[float]] = []
    for step, (start, end) in enumerate(pairwise(ends), start=1):
        if step < WARMUP_STEPS:
            continue
        if is_first_of_block(step):
            blocks.append([])  # this step is left out: the mode changes in it
        else:
            blocks[-1].append(end - start)
    means = [statistics.fmean(block) for block in blocks]
    pairs = []
    for number in range(0, len(means) - 1, 2):
        off, on = means[number : number + 2]
        first = WARMUP_STEPS + number * BLOCK_STEPS
        pairs.append((on, off) if is_on(first) else (off, on))
    return pairs


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns a 95 % interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> int:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=count(), default=40, help="of blocks; default: %(default)s")
    args = parser.parse_args()
    console = Console(width=110, highlight=False)
    costs = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(prefix="steady-state-") as folder:
            costs[name] = measure(case, args.pairs, Path(folder))
    table = Table(
        title=f"{args.pairs} pairs of {BLOCK_STEPS}-step blocks, {NODES} ranks on "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.1f}; "
        "ratio: recoverable / not"
    )
    table.add_column("case")
    for column in ("a step, ms", "wall ratio", "95 %", "CPU ms", "CPU ratio", "95 %"):
        table.add_column(column, justify="right")
    kept = True
    for name, cost in costs.items():
        cells = []
        for pairs, outside in ((cost.wall, 0.0), (cost.cpu, cost.outside)):
            ratios = [(on + outside) / off for off, on in pairs]
            low, high = interval(ratios)
            ratio = statistics.median(ratios)
            kept &= ratio <= BAR
            off = statistics.median(off for off, _ in pairs)
            cells += [f"{1000 * off:.1f}", f"{ratio:.4f}", f"{low:.3f} to {high:.3f}"]
        table.add_row(name, *cells)
    console.print(table)
    parts = Table(title="processor time of the parts, ms a step (ranks: mean of one rank)")
    parts.add_column("part")
    for name in costs:
        parts.add_column(name, justify="right")
    for part in max((cost.parts for cost in costs.values()), key=len):
        parts.add_row(part, *(f"{1000 * cost.parts.get(part, 0):.3f}" for cost in costs.values()))
    parts.add_row("all of a rank", *(f"{1000 * sum(c.parts.values()):.3f}" for c in costs.values()))
    outside = (f"{1000 * cost.outside:.3f}" for cost in costs.values())
    parts.add_row("agents, launcher, coordinator (all)", *outside)
    console.print(parts)
    waits = ", ".join(f"{cost.waits:.0f}" for cost in costs.values())
    console.print(f"fenced waits of a rank in a step: {waits}; bar: ratios at most {BAR}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
