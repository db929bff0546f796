"""FSMoE, section 6.2, figure 5: lines through the times of collectives and matrix products.

simulated: times are drawn from the costs that the paper printed, with noise, at its sizes; the fit
of this project finds the costs again. measured: the profiler of this project times gloo collectives
and matrix products on two processes of this machine: first as two nodes, then as one.

    .venv/bin/python tools/reproduce/fsmoe_fits.py

Writes fsmoe_fits.csv and .png into --out, and prints the paper's numbers beside ours.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.algorithms.cost_model import FitQuality
from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.simulation.overlap import TESTBED_A, TESTBED_B
from tests.support import gloo_ranks
from tools.reproduce.figure import Compared, Figure, flags, plot_lines, publish, write_csv

R2 = {
    "gemm": 0.9987,
    "a2a": 0.9999,
    "allgather": 0.9999653,
    "reducescatter": 0.9999599,
    "allreduce": 0.9999896,
}
RUNS = 5
NOISE = 0.01  # standard deviation of a time, relative
# Elements of the paper's messages, and of its products' inputs, which are taken to have 4096
# columns of weights: how many it does not say.
MESSAGES = [own << 18 for own in range(1, 25)]
PRODUCTS = [4096.0 * (own << 19) for own in range(1, 13)]
# One run in ten of a busy machine takes thrice as long.
DISTURBED_SHARE, DISTURBED_TIMES = 0.1, 3.0
SMALL = 16  # chunks of the smallest message; the time of one is asked for

# Nodes of two ranks: as many ranks as cores. The second has what is inside a node.
LAYOUTS = ((0, 1), (0, 0))
BUDGET_SECONDS = 8.0  # of each
LARGEST_BYTES = 1 << 26
TIMEOUT_SECONDS = 50.0  # of each
WHY_MEASURED = (
    "Two cores, shared by the ranks and by whatever else the machine does, are no quiet cluster; "
    "every time is the slowest rank's."
)


def drawn(
    alpha: float, beta: float, sizes: Sequence[float], seed: int, disturbed: bool = False
) -> tuple[list[float], list[float]]:
    """Returns sizes and times of all runs, drawn around a line."""
    rng = np.random.default_rng(seed)
    units = np.repeat(np.array(sizes, dtype=float), RUNS)
    times = (alpha + beta * units) * (1 + NOISE * rng.standard_normal(len(units)))
    if disturbed:
        times *= np.where(rng.random(len(units)) < DISTURBED_SHARE, DISTURBED_TIMES, 1.0)
    return units.tolist(), times.tolist()


def least_squares(units: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Returns alpha and beta of the paper's fit."""
    beta, alpha = np.polyfit(units, times, 1)
    return float(alpha), float(beta)


def recovered(draws: int) -> tuple[list[Compared], list[tuple[object, ...]]]:
    """Returns a row for every printed alpha and beta, with the mean of fits; and the fits."""
    rows, fits = [], []
    for testbed in (TESTBED_A, TESTBED_B):
        for name, (alpha, beta) in testbed.costs.items():
            sizes = PRODUCTS if name == "gemm" else MESSAGES
            found = [fit_linear(*drawn(alpha, beta, sizes, seed))[0] for seed in range(draws)]
            fits += [("simulated", testbed.name, name, own.alpha_ms, own.beta, "") for own in found]
            unit = "multiply-add" if name == "gemm" else "element"
            for what, paper, values in (
                ("alpha, ms", alpha, [own.alpha_ms for own in found]),
                (f"beta, ms per {unit}", beta, [own.beta for own in found]),
            ):
                mean = float(np.mean(values))
                rows.append(Compared(f"{testbed.name}, {name}: {what}", paper, mean, "simulated"))
    return rows, fits


def disturbed(draws: int) -> list[Compared]:
    """Returns by how much the time of a small message is missed where runs are disturbed."""
    errors: dict[str, list[float]] = {"ours": [], "least squares": []}
    for testbed in (TESTBED_A, TESTBED_B):
        for name, (alpha, beta) in testbed.costs.items():
            sizes = PRODUCTS if name == "gemm" else MESSAGES
            small = min(sizes) / SMALL
            for seed in range(draws):
                runs = drawn(alpha, beta, sizes, seed, disturbed=True)
                line = fit_linear(*runs)[0]
                lines = {
                    "ours": (line.alpha_ms, line.beta),
                    "least squares": least_squares(*runs),
                }
                for who, (own_alpha, own_beta) in lines.items():
                    own = own_alpha + own_beta * small
                    errors[who].append(abs(own / (alpha + beta * small) - 1))
    return [
        Compared(
            f"one run in ten disturbed: mean error of a small time, {who}",
            None,
            float(np.mean(own)),
            "simulated",
        )
        for who, own in errors.items()
    ]


def measured() -> dict[str, Any]:
    """Returns what the ranks of both layouts say, as if it were one."""
    parts = []
    for nodes in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            ranks = gloo_ranks.run(
                "tools.reproduce.fsmoe_ranks:profile",
                len(nodes),
                Path(folder),
                timeout_seconds=TIMEOUT_SECONDS,
                nodes=nodes,
                budget_seconds=BUDGET_SECONDS,
                largest_bytes=LARGEST_BYTES,
            )
        parts.append(ranks[0])
    first, second = parts
    told = {name: {**second[name], **first[name]} for name in ("samples", "lines", "quality")}
    return told | {
        name: first[name] + second[name] for name in ("measuring_seconds", "fitting_seconds")
    }


def measured_rows(told: dict[str, Any]) -> list[Compared]:
    """Returns what was measured here."""
    rows = []
    for name, r2 in R2.items():
        quality, line = told["quality"][name], told["lines"][name]
        rows.append(Compared(f"R2, {name}", r2, quality["r2"], "measured", WHY_MEASURED))
        rate = 1e-6 / line["beta"]
        unit = "GFLOP/s" if name == "gemm" else "GB/s"
        rows += [
            Compared(f"here, {name}: alpha, ms", None, line["alpha_ms"], "measured"),
            Compared(f"here, {name}: rate, {unit}", None, rate, "measured"),
        ]
    doubted = sum(FitQuality(**own).distrust() is not None for own in told["quality"].values())
    text = f"lines that the planner would warn of, of {len(told['quality'])}"
    rows.append(Compared(text, None, doubted, "measured"))
    rows.append(
        Compared("measuring, s (paper: < 100)", None, told["measuring_seconds"], "measured")
    )
    rows.append(
        Compared(
            "fitting all lines, ms of CPU (paper: < 10)",
            None,
            1e3 * told["fitting_seconds"],
            "measured",
        )
    )
    return rows


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "", draws=20).parse_args()
    told = measured()
    rows, fits = recovered(args.draws)
    fits += [
        ("measured", "here", name, line["alpha_ms"], line["beta"], told["quality"][name]["r2"])
        for name, line in told["lines"].items()
    ]
    write_csv(
        args.out / "fsmoe_fits.csv",
        ("how", "testbed", "operation", "alpha_ms", "beta", "r2"),
        fits,
    )
    panels = {}
    for name, points in told["samples"].items():
        units, times = zip(*points, strict=True)
        line = told["lines"][name]
        fitted = [line["alpha_ms"] + line["beta"] * own for own in units]
        scale, unit = (1e9, "GFLOP") if name == "gemm" else (1 << 20, "MiB")
        xs = [own / scale for own in units]
        panels[f"{name}, {unit}"] = {"measured": (xs, times), "line": (xs, fitted)}
    plot_lines(args.out / "fsmoe_fits.png", panels, "size", "ms", "measured")
    publish(
        args.out,
        Figure(
            "fsmoe_fits",
            "Section 6.2: costs of operations, fitted",
            "Simulated: times drawn from the costs that the paper printed, with 1 % of noise, at "
            "its sizes, five runs each; mean of the lines that this project fits. Measured: its "
            "profiler on two gloo processes of this machine; the picture shows these.",
            (*rows, *disturbed(args.draws), *measured_rows(told)),
            (
                "R2 says little of small messages, which chunks are: large ones decide it. So ours "
                "fits relative errors over medians, and leaves out sizes that were disturbed "
                "(`algorithms/linear_fit.py`). Sizes of the simulated products are assumed.",
            ),
            ("fsmoe_fits.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
