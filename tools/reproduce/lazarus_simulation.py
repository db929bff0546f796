"""Lazarus, section 6.7: DeepSeek-V3 on 256 to 1,024 GPUs, by the probability that a node fails.

A simulation, in the paper as here.

    .venv/bin/python tools/reproduce/lazarus_simulation.py

The paper gives: 8 GPUs a node (H200, 400 Gb/s each), 4 replicas a GPU, tensor parallelism inside a
node for the dense part, and node failure probabilities p. It does not give the time that p is for,
whether nodes come back, loads as numbers (ShareGPT), the times of steps (a model of another
project), how often the baselines save and where to. Here:

- a step with even loads takes 20 s on all nodes (about what DeepSeek-V3's report comes to), and
  half of it is experts and their communication; loads are Zipf;
- state is 14 bytes a parameter, on storage that reads and writes 128 GB/s, whoever asks;
- DS saves as often as pays (blocking, as DeepSpeed), the two others a fifth as often: the paper's
  ratio in section 6.2;
- a restart, a recovery and the window for joining nodes take what they take in lazarus_setup.py;
- another node is there an hour after a failure.

Three choices are fitted, so that four of the eight ratios are no results. Zipf's exponent, and the
half hour in which a node fails with probability p: to the ratios at 512 GPUs and p = 0.01. Storage
that all share, whatever their number: to those over DS at 256 and 1,024 GPUs. What other choices
give was looked at, for ratios over DS at (512, 0.01), (512, 0.15), (256, 0.05), (1024, 0.05), where
the paper has 3.9, 14.5, 4.5 and 10.6: with 2 GB/s of storage for each node 3.9, 13.3, 6.4 and 7.2;
with an hour for p 3.5, 7.3, 4.5 and 5.3; with nodes back after 30 minutes the second is about 17.

Writes lazarus_simulation.csv and .png into --out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.simulation.compare import Options, Result, choose_settings, simulate
from megatron_resilient.simulation.costs import GIB, Costs, SaveCost
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.policy import Policy
from megatron_resilient.simulation.systems import parse_system
from megatron_resilient.simulation.workload import Workload, zipf_loads
from tools.reproduce.figure import Compared, Figure, flags, plot_bars, publish, write_csv
from tools.reproduce.lazarus_setup import (
    JOIN_WINDOW_SECONDS,
    RECOVERY_SECONDS,
    START_SECONDS,
    STATE_BYTES,
    SYSTEMS,
)

GPUS_PER_NODE = 8
SLOTS_PER_GPU = 4
# DeepSeek-V3: 58 MoE layers of 256 experts of 3 x 7168 x 2048 parameters, 671e9 in all.
EXPERTS, MOE_LAYERS, LOAD_LAYERS = 256, 58, 2
EXPERT_PARAMETERS, PARAMETERS = 3 * 7168 * 2048, 671e9
STEP_SECONDS, EXPERT_SHARE = 20.0, 0.5
STORAGE_BYTES_PER_SECOND = 128e9
LINK_BYTES_PER_SECOND = 400e9 / 8
REPAIR_SECONDS = 3600.0
LESS_OFTEN = 5
# Fitted.
ZIPF_EXPONENT = 0.67
FAILURE_SECONDS = 1800.0

HOURS = 12.0
# (GPUs, p) -> samples of Lazarus over those of each baseline, in the paper.
PAPER = {
    (512, 0.01): {"DS(FT)": 2.9, "DS": 3.9},
    (512, 0.15): {"DS(FT)": 3.6, "DS": 14.5},
    (256, 0.05): {"DS(FT)": 2.9, "DS": 4.5},
    (1024, 0.05): {"DS(FT)": 3.5, "DS": 10.6},
}
FITTED = {
    (512, 0.01, "DS(FT)"),
    (512, 0.01, "DS"),
    (256, 0.05, "DS"),
    (1024, 0.05, "DS"),
}
WHY = (
    "In the paper DS(FT) falls further behind with more failures, here it does not: the nodes that "
    "are left form whole expert-parallel groups of 64 GPUs again, and with 4 to 16 copies of "
    "everything none of them lost an expert here. What its DS(FT) does at this size, and whether "
    "nodes come back, the paper does not say."
)
WHY_DS = (
    "Storage, the time that p is for and the repair of nodes are assumed or fitted: see the head "
    "of tools/reproduce/lazarus_simulation.py."
)


def workload(nodes: int, seed: int) -> Workload:
    """Returns the model on so many nodes."""
    experts = MOE_LAYERS * EXPERTS * EXPERT_PARAMETERS
    return Workload(
        nodes=nodes,
        ranks_per_node=GPUS_PER_NODE,
        loads=zipf_loads(LOAD_LAYERS, EXPERTS, ZIPF_EXPONENT, seed),
        slots_per_node=SLOTS_PER_GPU * GPUS_PER_NODE,
        moe_layers=MOE_LAYERS,
        expert_bytes=EXPERT_PARAMETERS * STATE_BYTES,
        dense_bytes=(PARAMETERS - experts) * STATE_BYTES,
    )


def costs(nodes: int) -> Costs:
    """Returns what things cost there."""
    # Ranks share the storage.
    storage = nodes * GPUS_PER_NODE * GIB / STORAGE_BYTES_PER_SECOND
    save = SaveCost(stall_seconds_per_gib=storage)
    return Costs(
        step_seconds=STEP_SECONDS,
        expert_share=EXPERT_SHARE,
        resilience_overhead=0.0,
        restart_seconds=START_SECONDS,
        recovery_seconds=RECOVERY_SECONDS,
        join_seconds=RECOVERY_SECONDS,
        join_window_seconds=JOIN_WINDOW_SECONDS,
        load_seconds_per_gib=storage,
        refill_seconds_per_gib=GIB / LINK_BYTES_PER_SECOND,
        stock_save=save,
        our_save=save,
    )


def runs(gpus: int, probability: float, seed: int) -> dict[str, Result]:
    """Returns what each system makes of one draw of failures."""
    nodes = gpus // GPUS_PER_NODE
    mtbf = FAILURE_SECONDS / (probability * nodes)
    trace = draw_failures(nodes, mtbf, 3600 * HOURS, seed=seed, repair_seconds=REPAIR_SECONDS)
    work, own = workload(nodes, seed), costs(nodes)
    stock = Policy(parse_system(SYSTEMS["DS"]), work, own)
    interval = choose_settings(trace, stock, Options()).interval
    return {
        name: simulate(
            trace,
            parse_system(system),
            work,
            own,
            Options(interval=interval * (1 if name == "DS" else LESS_OFTEN), exact=True),
        )
        for name, system in SYSTEMS.items()
    }


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "", draws=2).parse_args()
    rows, compared = [], []
    bars: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    for (gpus, probability), paper in PAPER.items():
        draws = [runs(gpus, probability, seed) for seed in range(args.draws)]
        steps = {name: sum(draw[name].steps for draw in draws) for name in SYSTEMS}
        undisturbed = HOURS * 3600 * args.draws / STEP_SECONDS
        title = f"{gpus} GPUs, p = {probability}"
        for name in SYSTEMS:
            outcomes = [draw[name].outcome for draw in draws]
            rows.append(
                (
                    gpus,
                    probability,
                    name,
                    steps[name],
                    sum(own.interruptions for own in outcomes),
                    sum(own.rollbacks for own in outcomes),
                )
            )
            bars[name][f"{gpus}\np={probability}"] = steps[name] / undisturbed
        for baseline, ratio in paper.items():
            compared.append(
                Compared(
                    f"{title}: samples, ours / {baseline}",
                    ratio,
                    steps["ours"] / max(1, steps[baseline]),
                    "calibrated" if (gpus, probability, baseline) in FITTED else "simulated",
                    WHY if baseline == "DS(FT)" else WHY_DS,
                )
            )
    write_csv(
        args.out / "lazarus_simulation.csv",
        ("gpus", "probability", "system", "steps", "interruptions", "rollbacks"),
        rows,
    )
    plot_bars(
        args.out / "lazarus_simulation.png",
        {"DeepSeek-V3": bars},
        "steps / steps with even loads, undisturbed",
    )
    publish(
        args.out,
        Figure(
            "lazarus_simulation",
            "Section 6.7: DeepSeek-V3 on 256 to 1,024 GPUs",
            f"Samples in {HOURS:g} hours in which nodes fail and are replaced, mean of "
            f"{args.draws} draws, by the event simulator of `megatron-resilient simulate`. The "
            "loads, the time in which a node fails with probability p, and the storage are fitted "
            "to four of the ratios.",
            tuple(compared),
            (
                "Assumed, as the paper does not say: 20 s a step, half of it experts; saves as "
                "often as pays; a new node an hour after a failure. Other choices were tried, and "
                "give other ratios over DS (7 to 17 at p = 0.15): they stand in the head of "
                "tools/reproduce/lazarus_simulation.py. That DS falls behind with the number of "
                "failures is a result, how far is hardly one.",
            ),
            ("lazarus_simulation.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
