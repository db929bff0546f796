"""Lazarus, section 6.4: samples over time on 80 minutes of a spot trace, with at most 10 nodes.

A simulation, on the trace of AWS P3 instances of Bamboo (MIT licence, not part of this project):

    .venv/bin/python tools/reproduce/lazarus_spot.py --trace ../shared/data/bamboo/p3-trace.csv

How the nodes of the trace are capped at 10: see tools/reproduce/spot_segment.py.
Without --trace, failures are drawn (one every 8 minutes, 1.5 nodes each), and no number is the
paper's.

Writes lazarus_spot.csv and .png into --out, and prints the paper's ratios beside ours.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.simulation.trace import Trace
from tools.reproduce.figure import (
    Compared,
    Figure,
    flags,
    plot_lines,
    publish,
    write_csv,
)
from tools.reproduce.lazarus_setup import (
    GPT_L,
    GPT_S,
    SYSTEMS,
    Model,
    run,
    samples_over_time,
)
from tools.reproduce.spot_segment import (
    MINUTES,
    PAPER_RATIOS,
    add_trace_flag,
    spot_traces,
)

POINTS = 40
# The paper's saves for failures this frequent; ours too: only here it saves.
INTERVALS = {"DS": 50, "DS(FT)": 250, "ours": 250}
PAPER = {model: PAPER_RATIOS[model.name] for model in (GPT_S, GPT_L)}
WHY = (
    "Loads, and how nodes are capped at 10, are not in the paper: see the heads of "
    "tools/reproduce/spot_segment.py and lazarus_setup.py. The cap decides how many losses there "
    "are: four or five here."
)


def of_ours(
    model: Model, traces: Sequence[Trace], paper_restores: float | None
) -> tuple[Compared, ...]:
    """Returns how much of the time ours recovers, and how often it needs a checkpoint."""
    ours = [run("ours", trace, model, seed, INTERVALS["ours"]) for seed, trace in enumerate(traces)]
    recovery = sum(own.outcome.accounts.recovery / own.seconds for own in ours) / len(ours)
    restores = sum(own.outcome.rollbacks for own in ours) / len(ours)
    return (
        Compared(
            f"{model.name}: share of time in recoveries (paper: < 0.10)",
            None,
            recovery,
            "simulated",
        ),
        Compared(
            f"{model.name}: restores of ours from a checkpoint",
            paper_restores,
            restores,
            "simulated",
            WHY,
        ),
    )


def main() -> int:
    """Makes the figure."""
    parser = flags(__doc__ or "", draws=10)
    add_trace_flag(parser)
    args = parser.parse_args()
    traces = spot_traces(args.trace, args.draws)
    times = [MINUTES * point / POINTS for point in range(1, POINTS + 1)]
    rows: list[tuple[object, ...]] = []
    panels, compared = {}, []
    for model, paper in PAPER.items():
        samples = {}
        for system in SYSTEMS:
            runs = [
                samples_over_time(system, trace, model, seed, INTERVALS[system], times)
                for seed, trace in enumerate(traces)
            ]
            samples[system] = [sum(values) / len(runs) for values in zip(*runs, strict=True)]
            rows += [
                (model.name, system, at, value)
                for at, value in zip(times, samples[system], strict=True)
            ]
        panels[model.name] = {name: (times, values) for name, values in samples.items()}
        for baseline in ("DS", "DS(FT)"):
            ratio = samples["ours"][-1] / samples[baseline][-1]
            known = paper[baseline] if args.trace else None
            what = f"{model.name}: samples, ours / {baseline}"
            compared.append(Compared(what, known, ratio, "simulated", WHY))
        compared += of_ours(model, traces, paper_restores=1.0 if args.trace else None)
    write_csv(args.out / "lazarus_spot.csv", ("model", "system", "minute", "samples"), rows)
    plot_lines(args.out / "lazarus_spot.png", panels, "minutes", "samples")
    source = f"Bamboo's {args.trace.name}" if args.trace else "drawn failures: no trace was given"
    publish(
        args.out,
        Figure(
            "lazarus_spot",
            "Section 6.4: 80 minutes of a spot trace",
            f"Samples over time on at most 10 spot nodes, simulated ({source}).",
            tuple(compared),
            pictures=("lazarus_spot.png",),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
