"""Lazarus, figures 4 and 5, theorem 1: its worked examples, counted exactly and by enumeration.

    .venv/bin/python tools/reproduce/lazarus_examples.py

The paper draws its plans without numbers that could be copied. Those below have its nodes, experts
and lost nodes, and its counts; slots and replica counts are chosen to fit. Every count is made
twice: with the recovery probability that `megatron-resilient plan` prints, and by enumeration.
Then the plans of every small instance are enumerated, to see where maximum rank overlap (MRO), as
printed, is the best plan, as theorem 1 says.

Writes lazarus_examples.csv and .png into --out.
"""

import sys
from collections.abc import Sequence
from math import comb
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.algorithms.placement import place_replicas
from megatron_resilient.algorithms.recovery_probability import (
    fatal_node_sets,
    recovery_probability,
)
from megatron_resilient.algorithms.replication import allocate_replicas
from tests.support import planning_oracles as oracles
from tools.reproduce.figure import Compared, Figure, flags, plot_bars, publish, write_csv

# Figure 4: four experts on five nodes, three of which are lost. Experts of each node.
FIGURE_4_LOADS, FIGURE_4_SLOTS = (2, 2, 8, 8), 4
APART = ((0, 1, 2, 3), (0, 2, 2, 3), (1, 2, 2, 3), (2, 2, 3, 3), (2, 3, 3, 3))
NESTED = ((0, 1, 2, 3), (0, 1, 2, 3), (2, 2, 3, 3), (2, 2, 3, 3), (2, 2, 3, 3))
# Figure 5: two groups of two experts on five nodes, three of which are lost.
FIGURE_5_REPLICAS, FIGURE_5_SLOTS = (2, 2, 3, 3), 2
GROUPED = ((0, 1), (0, 1), (2, 3), (2, 3), (2, 3))
CROSSED = ((0, 1), (0, 2), (1, 3), (2, 3), (2, 3))
# Theorem 1 fails here: three nodes of two slots, three experts with two replicas each.
THEOREM_REPLICAS, THEOREM_NODES, THEOREM_SLOTS = (2, 2, 2), 3, 2

NO_REST, WHOLE, CUT = "E <= c, or c divides E", "last group whole", "last group cut short"
# In the picture.
SHORT = {NO_REST: "E <= c\nor c | E", WHOLE: "last group\nwhole", CUT: "last group\ncut short"}
# Instances up to these sizes are enumerated.
MOST_NODES, MOST_SLOTS, MOST_EXPERTS = 5, 3, 6
TRUNCATED = (
    "The proof of theorem 1 takes every group to have as many nodes as its first expert has "
    "replicas. Where the last group is cut short (the first experts of the groups have more "
    "replicas together than there are nodes) the plan as printed can lose an expert that another "
    "plan keeps. Ours falls back to a search there."
)

Plan = Sequence[Sequence[int]] | np.ndarray


def recovery(plan: Plan, losses: int) -> float:
    """Returns the share of losses of so many nodes that keep all experts; counted twice."""
    slots = np.array(plan)
    experts = int(slots.max()) + 1
    fatal = fatal_node_sets(slots, experts)
    exact = recovery_probability(fatal, len(slots), [losses])[losses].value
    counted = oracles.recovery_by_enumeration(slots, experts, losses)
    assert abs(exact - counted) < 1e-12, (exact, counted)
    return exact


def ours(replicas: Sequence[int], nodes: int, slots: int) -> np.ndarray:
    """Returns our plan for replica counts in ascending order."""
    return place_replicas([replicas], nodes, slots, min_replicas=replicas[0]).slots[0]


def best(replicas: tuple[int, ...], nodes: int, slots: int, losses: int) -> float:
    """Returns the highest recovery probability that any plan has."""
    fatal = oracles.fewest_fatal_losses(replicas, nodes, slots)[losses]
    return 1 - fatal / comb(nodes, losses)


def kind(replicas: Sequence[int], nodes: int, slots: int) -> str:
    """Returns which case of theorem 1 an instance is; replicas ascend."""
    if len(replicas) <= slots or not len(replicas) % slots:
        return NO_REST
    if sum(replicas[::slots]) <= nodes:
        return WHOLE
    return CUT


def scan() -> dict[str, dict[str, int]]:
    """Returns, by case: how many instances there are, and for how many a plan is not the best."""
    found: dict[str, dict[str, int]] = {}
    for replicas, nodes, slots in oracles.small_instances(MOST_NODES, MOST_SLOTS, MOST_EXPERTS):
        fewest = oracles.fewest_fatal_losses(replicas, nodes, slots)
        counts = found.setdefault(kind(replicas, nodes, slots), {"all": 0, "MRO": 0, "ours": 0})
        counts["all"] += 1
        for name, policy in (("MRO", oracles.rank_overlap), ("ours", ours)):
            plan = policy(replicas, nodes, slots)
            counts[name] += any(
                recovery(plan, losses) < 1 - fewest[losses] / comb(nodes, losses) - 1e-12
                for losses in range(nodes + 1)
            )
    return found


def worked() -> list[Compared]:
    """Returns the rows of the worked examples."""
    figure_4 = allocate_replicas(FIGURE_4_LOADS, 5 * FIGURE_4_SLOTS, 2).replicas
    small = allocate_replicas([1] * 16, 5 * 6, 2)
    theorem = THEOREM_REPLICAS, THEOREM_NODES, THEOREM_SLOTS
    exact: list[tuple[str, float | None, float, str]] = [
        ("Figure 4, plan A: recovered of 10 losses", 5, 10 * recovery(APART, 3), ""),
        ("Figure 4, plan B (nested)", 7, 10 * recovery(NESTED, 3), ""),
        ("Figure 4, our plan", 7, 10 * recovery(ours(figure_4, 5, FIGURE_4_SLOTS), 3), ""),
        ("Figure 4, best of all plans", 7, 10 * best(figure_4, 5, FIGURE_4_SLOTS, 3), ""),
        ("Figure 5, groups: fatal of 10 losses", 4, 10 - 10 * recovery(GROUPED, 3), ""),
        ("Figure 5, replicas crossed", 7, 10 - 10 * recovery(CROSSED, 3), ""),
        (
            "Figure 5, our plan",
            4,
            10 - 10 * recovery(ours(FIGURE_5_REPLICAS, 5, FIGURE_5_SLOTS), 3),
            "",
        ),
        (
            "Figure 5, best of all plans",
            4,
            10 - 10 * best(FIGURE_5_REPLICAS, 5, FIGURE_5_SLOTS, 3),
            "",
        ),
        (
            "Section 6.2, f that is kept: 16 experts in 5 x 6 slots, f = 2 asked for",
            1,
            small.effective_min_replicas,
            "",
        ),
        (
            "Theorem 1, N=3 c=2 r=(2,2,2): recovery from 1 loss, MRO as printed",
            1,
            recovery(oracles.rank_overlap(*theorem), 1),
            TRUNCATED,
        ),
        ("Theorem 1, the same: our plan", 1, recovery(ours(*theorem), 1), ""),
        ("Theorem 1, the same: best of all plans", 1, best(*theorem, 1), ""),
    ]
    return [Compared(what, paper, value, "computed", why) for what, paper, value, why in exact]


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "").parse_args()
    rows = worked()
    scanned = scan()
    for case, counts in scanned.items():
        for name in ("MRO", "ours"):
            label = "MRO as printed" if name == "MRO" else "ours"
            rows.append(
                Compared(
                    f"{case}, of {counts['all']} instances: {label} not the best",
                    0,
                    counts[name],
                    "computed",
                    TRUNCATED if counts[name] else "",
                )
            )
    write_csv(
        args.out / "lazarus_examples.csv",
        ("what", "paper", "ours"),
        [(row.what, row.paper, row.ours) for row in rows],
    )
    plot_bars(
        args.out / "lazarus_examples.png",
        {
            "share of instances with a better plan": {
                name: {SHORT[case]: counts[key] / counts["all"] for case, counts in scanned.items()}
                for name, key in (("MRO as printed", "MRO"), ("ours", "ours"))
            }
        },
        "share",
        "computed",
    )
    publish(
        args.out,
        Figure(
            "lazarus_examples",
            "Figures 4 and 5, theorem 1: worked examples",
            "Recovery probabilities of small plans, exact and by enumeration, and the instances of "
            f"up to {MOST_NODES} nodes, {MOST_SLOTS} slots and {MOST_EXPERTS} experts for which "
            "enumeration knows a better plan, for some number of lost nodes. (Of the theorem's own "
            "example the paper's 1 is its claim that fewer than f = 2 losses are always survived.)",
            tuple(rows),
            (
                "The plans of figures 4 and 5 are drawn without replica counts: these have the "
                "paper's nodes, experts, losses and results.",
            ),
            ("lazarus_examples.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
