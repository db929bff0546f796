"""MoC-System, Eq. 3, 4 and 16: when partial saves beside training win, and how often to save.

Computed with the cost model that training tunes itself by (`checkpoint_tuning`), for stalls and
intervals in iterations as the paper reports them; and simulated, with failures drawn, to see
whether sqrt(2 O_save / lambda) is the best interval for a job that redoes what it lost.

    .venv/bin/python tools/reproduce/moc_interval.py
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_resilient.algorithms.checkpoint_tuning import overhead, save_interval
from megatron_resilient.simulation.compare import Options, simulate
from megatron_resilient.simulation.costs import Costs, SaveCost
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.systems import parse_system
from megatron_resilient.simulation.workload import Workload, zipf_loads
from tools.reproduce.figure import Compared, Figure, flags, plot_lines, publish, write_csv
from tools.reproduce.moc_stall import BASE_INTERVAL, FASTER, MOC_ASYNC, MOC_INTERVAL, blocking_share

# A blocking save, in iterations (section 6.2, see moc_stall.py), and what MoC leaves of it.
STALL = {
    "full, blocking": blocking_share(FASTER[0], MOC_ASYNC[1]),
    "MoC": blocking_share(FASTER[0], MOC_ASYNC[1]) * (1 - MOC_ASYNC[1]),
}
PERSIST = {"full, blocking": BASE_INTERVAL, "MoC": MOC_INTERVAL}
STEPS_BETWEEN_FAULTS = (100, 300, 1000, 3000, 10_000)
# The simulated job: seconds of a step, of a save's stall, between failures, of the trace.
STEP, WAIT, MTBF, SECONDS = 1.0, 4.0, 1800.0, 40 * 3600.0
FACTORS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)


def best(way: str, between: float) -> tuple[int, float]:
    """Returns the interval that training would choose, and what saves and lost work then take."""
    interval = save_interval(PERSIST[way], 1.0, 1 / between, STALL[way])
    return interval, overhead(STALL[way], interval, 1 / between)


def wasted(interval: int, draws: int) -> float:
    """Returns the share of time in stalls and lost work, simulated; mean over draws."""
    workload = Workload(2, 1, zipf_loads(1, 4, 0.0), 4, 1, 1.0, 1.0)
    costs = Costs(
        step_seconds=STEP,
        expert_share=0.0,
        resilience_overhead=0.0,
        restart_seconds=0.0,
        load_seconds_per_gib=0.0,
        refill_seconds_per_gib=0.0,
        join_seconds=0.0,
        join_window_seconds=0.0,
        stock_save=SaveCost(stall_seconds=WAIT),
    )
    shares = []
    for seed in range(draws):
        trace = draw_failures(2, MTBF, SECONDS, seed=seed, repair_seconds=0.0)
        found = simulate(
            trace, parse_system("restart"), workload, costs, Options(interval=interval)
        )
        own = found.outcome.accounts
        shares.append((own.stalled + own.lost) / found.seconds)
    return statistics.fmean(shares)


def main() -> int:
    """Makes the figure."""
    args = flags(__doc__ or "", draws=10).parse_args()
    rows: list[tuple[object, ...]] = []
    rates: dict[str, tuple[list[float], list[float]]] = {}
    for way in STALL:
        found = [best(way, between) for between in STEPS_BETWEEN_FAULTS]
        xs = [math.log10(between) for between in STEPS_BETWEEN_FAULTS]
        rates[way] = xs, [share for _, share in found]
        rows += [
            (way, between, interval, share)
            for between, (interval, share) in zip(STEPS_BETWEEN_FAULTS, found, strict=True)
        ]
    optimum = save_interval(WAIT, STEP, STEP / MTBF, WAIT)
    intervals = [max(1, round(optimum * factor)) for factor in FACTORS]
    xs = [math.log10(interval) for interval in intervals]
    simulated = [wasted(interval, args.draws) for interval in intervals]
    formula = [overhead(WAIT / STEP, interval, STEP / MTBF) for interval in intervals]
    for name, ys in (("simulator", simulated), ("Eq. 4", formula)):
        rows += [
            (name, MTBF / STEP, interval, share)
            for interval, share in zip(intervals, ys, strict=True)
        ]
    header = ("what", "steps_between_faults", "interval", "share_of_time")
    write_csv(args.out / "moc_interval.csv", header, rows)
    tried = {"simulator": (xs, simulated), "Eq. 4": (xs, formula)}
    for name, lines, label, how in (
        ("moc_interval", tried, "log10 of the interval in steps", "simulated"),
        ("moc_interval_rates", rates, "log10 of steps between faults", "computed"),
    ):
        panel = {"share of time in stalls and lost work": lines}
        plot_lines(args.out / f"{name}.png", panel, label, "share of time", how)
    at = FACTORS.index(1.0)
    gain = {
        between: best("full, blocking", between)[1] / best("MoC", between)[1]
        for between in STEPS_BETWEEN_FAULTS
    }
    publish(
        args.out,
        Figure(
            "moc_interval",
            "Eq. 3, 4 and 16: overhead, and the best interval",
            "Share of time that saves and lost work take, at the interval that training would "
            "choose, for blocking full saves and for MoC's; and a simulated job around its best "
            "interval.",
            (
                Compared(
                    "best interval over sqrt(2 O_save / lambda)",
                    1.0,
                    optimum / math.sqrt(2 * WAIT / STEP * MTBF / STEP),
                    "computed",
                ),
                Compared(
                    "lost and stalled at that interval, simulator / Eq. 4",
                    1.0,
                    simulated[at] / formula[at],
                    "simulated",
                ),
                Compared(
                    "least of the intervals tried / that at the best by Eq. 4",
                    1.0,
                    min(simulated) / simulated[at],
                    "simulated",
                ),
                *(
                    Compared(
                        f"a fault every {between:,} steps: overhead, full / MoC",
                        None,
                        own,
                        "computed",
                    )
                    for between, own in gain.items()
                ),
            ),
            (
                "Eq. 16 holds, so MoC wins, at every rate of faults here. Where none is bound "
                "by the time that a save takes, overheads are as the roots of the stalls, whatever "
                "the rate. Stalls and least intervals are those that the paper "
                "reports, in iterations. What partial saves lose (PLT) is not in Eq. 16.",
            ),
            ("moc_interval.png", "moc_interval_rates.png"),
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
