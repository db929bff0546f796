"""How evenly tokens spread over ranks, and what that saves: stock, EPLB's greedy, Lazarus, ours.

First tokens per rank, max / mean over 400 steps of each workload, from the planning code that
training uses: a new placement every 20 steps from the loads of the 10 before, two slots per expert
on average. Then CPU seconds of a real MoE layer on 4 gloo ranks, forward and backward: the largest
over ranks of the process time, which is what the others would wait for.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/balance.py

Ends with status 1 if a bar is missed.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.workloads import NAMES, STEADY, token_counts
from megatron_resilient.algorithms.rank_plan import plan_layers
from megatron_resilient.algorithms.token_assignment import assign_tokens, max_over_mean
from tests.support.pretrain_pool import PretrainPool

RANKS, EXPERTS, PAIRS_PER_RANK = 16, 64, 8192
SLOTS = 2 * EXPERTS // RANKS
# With two slots per expert a minimum of two would leave none for hot experts.
MIN_REPLICAS = 1
STEPS, INTERVAL, WINDOW = 400, 20, 10
STEADY_BAR, CHANGING_BAR = 1.05, 1.3
SPEED_BAR, OVERHEAD_BAR = 1.5, 1.05
LAYER = {"tokens": 1024, "hidden": 256, "ffn": 1024, "steps": 4, "repeats": 5, "seed": 5}
SYSTEMS = ("stock", "EPLB's greedy", "Lazarus' even split", "ours")


def eplb_holding(loads: np.ndarray) -> np.ndarray:
    """Places replicas as EPLB's global policy is described to: greedily by load.

    A replica more for the expert with most load per replica until slots are full; then replicas,
    heaviest first, onto the rank with least load that has room.
    """
    replicas = np.ones(len(loads), dtype=int)
    for _ in range(RANKS * SLOTS - len(loads)):
        replicas[np.argmax(loads / replicas)] += 1
    weights = np.repeat(loads / replicas, replicas)
    experts = np.repeat(np.arange(len(loads)), replicas)
    held: list[list[int]] = [[] for _ in range(RANKS)]
    weight = np.zeros(RANKS)
    for replica in np.argsort(-weights, kind="stable"):
        room = [rank for rank in range(RANKS) if len(held[rank]) < SLOTS]
        rank = min(room, key=lambda r: weight[r])
        held[rank].append(int(experts[replica]))
        weight[rank] += weights[replica]
    return np.array(held)


def imbalances(name: str, seed: int) -> dict[str, float]:
    """Returns the mean over steps of max / mean tokens per rank, by system."""
    stock = np.arange(EXPERTS).reshape(RANKS, -1)
    seen: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    # One interval before the measured steps gives the loads of the first placement.
    window: list[np.ndarray] = []
    eplb = ours = stock
    for step, counts in enumerate(
        token_counts(name, RANKS, EXPERTS, PAIRS_PER_RANK, INTERVAL + STEPS, seed)
    ):
        if step and step % INTERVAL == 0:
            loads = np.sum(window[-WINDOW:], axis=(0, 1))
            eplb = eplb_holding(loads)
            ours = np.array(plan_layers([loads.tolist()], RANKS, 1, SLOTS, MIN_REPLICAS)[0])
            window = []
        window.append(counts)
        if step < INTERVAL:
            continue
        seen["stock"].append(max_over_mean(counts.sum(axis=0).reshape(RANKS, -1).sum(axis=1)))
        seen["EPLB's greedy"].append(assign_tokens(counts, eplb, policy="even").imbalance)
        seen["Lazarus' even split"].append(assign_tokens(counts, ours, policy="even").imbalance)
        seen["ours"].append(assign_tokens(counts, ours).imbalance)
    return {system: statistics.fmean(values) for system, values in seen.items()}


def balance(console: Console) -> bool:
    """Prints the tokens per rank; returns whether the bars are kept."""
    table = Table(
        title=f"max / mean tokens per rank: {EXPERTS} experts, {RANKS} ranks x {SLOTS} slots"
    )
    for heading in ("workload", *SYSTEMS, "bar"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    kept = True
    for name in track(NAMES, console=console, transient=True):
        bar = STEADY_BAR if name in STEADY else CHANGING_BAR
        found = imbalances(name, seed=1)
        kept &= found["ours"] <= bar
        table.add_row(name, *(f"{found[system]:.3f}" for system in SYSTEMS), f"{bar:.2f}")
    console.print(table)
    return kept


def speed(console: Console) -> bool:
    """Prints critical-path CPU seconds of a layer; returns whether the bars are kept."""
    workloads = ("uniform", "zipf 1.2")
    measured = {}
    with PretrainPool(4) as pool:
        for topk in (1, 2):
            measured[topk] = pool.call(
                "benchmarks.balance_layer:measure",
                workloads=list(workloads),
                topk=topk,
                timeout_seconds=900,
                **LAYER,
            )
    table = Table(
        title="CPU seconds of an MoE layer of 8 experts, forward and backward, largest over 4 "
        f"ranks (median of {LAYER['repeats']}); ratio: stock / system"
    )
    systems = list(measured[1][0]["uniform"])
    for heading in ("workload", *systems):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    ratios: dict[tuple[int, str, str], float] = {}
    for topk, by_rank in measured.items():
        for name in workloads:
            slowest = {
                system: [
                    max(each) for each in zip(*(r[name][system] for r in by_rank), strict=True)
                ]
                for system in systems
            }
            cells = []
            for system in systems:
                ratio = statistics.median(
                    stock / own
                    for stock, own in zip(slowest["stock"], slowest[system], strict=True)
                )
                ratios[topk, name, system] = ratio
                cells.append(f"{statistics.median(slowest[system]):.3f} s  x{ratio:.2f}")
            table.add_row(f"{name}, top {topk}", *cells)
    console.print(table)
    gain = ratios[1, "zipf 1.2", "replicas"]
    overhead = max(1 / ratios[topk, "uniform", "slots without replicas"] for topk in measured)
    console.print(f"zipf 1.2, top 1: stock / replicas {gain:.2f} (bar: at least {SPEED_BAR})")
    console.print(
        f"uniform, nothing replicated: ours / stock {overhead:.3f} (bar: at most {OVERHEAD_BAR})"
    )
    return gain >= SPEED_BAR and overhead <= OVERHEAD_BAR


def main() -> int:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("balance", "speed"), help="one part")
    args = parser.parse_args()
    console = Console()
    kept = True
    if args.only != "speed":
        kept &= balance(console)
    if args.only != "balance":
        kept &= speed(console)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
