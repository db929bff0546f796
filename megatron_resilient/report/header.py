"""The head of the page: how the run ended, its key figures, and what it was."""

import statistics

from megatron_resilient.report.content import Exit, Fact
from megatron_resilient.report.run import Run
from megatron_resilient.report.text import (
    compact,
    duration,
    moment,
    percent,
    plural,
    significant,
)

_GOOD_EXITS = (0, "0", "completed", "done", "success")


def period(run: Run) -> str:
    """Returns when the run ran and for how long."""
    times = [event["time"] for event in run.events]
    jobs = len(run.summary.segments)
    return (
        f"{moment(min(times))} to {moment(max(times))}, "
        f"{duration(run.clock.total_seconds)} of running time"
        + (f" in {plural(jobs, 'job')}" if jobs > 1 else "")
    )


def how_it_ended(run: Run) -> Exit:
    """Returns the exit of the last job in words."""
    exit = run.summary.exit
    if exit is None:
        return Exit("No end written: running or killed", "open")
    if exit in _GOOD_EXITS:
        return Exit("Completed", "good")
    return Exit(
        f"Ended with exit code {exit}" if isinstance(exit, int) else f"Ended: {exit}", "bad"
    )


def tiles(run: Run) -> list[Fact]:
    """Returns the key figures."""
    summary = run.summary
    found = []
    if summary.losses:
        first, last = min(summary.losses), max(summary.losses)
        found.append(
            Fact(
                "Loss",
                significant(summary.losses[last], 4),
                f"from {significant(summary.losses[first], 4)} at step {first:,}"
                if first < last
                else f"at step {last:,}",
            )
        )
    if summary.steps:
        lost = (
            f"{summary.lost_steps:,} more rolled back" if summary.lost_steps else "none rolled back"
        )
        found.append(Fact("Steps done", f"{summary.steps:,}", lost))
        found.append(
            Fact("Tokens", compact(summary.tokens), f"{compact(summary.lost_tokens)} lost")
        )
    if summary.tokens_per_second is not None:
        found.append(Fact("Tokens per second", compact(summary.tokens_per_second), "median"))
    if summary.steps and run.effective_share is not None:
        found.append(
            Fact(
                "Effective time",
                percent(run.effective_share),
                "share in steps that count",
            )
        )
    if summary.recoveries:
        totals = [recovery["total_seconds"] for recovery in summary.recoveries]
        found.append(
            Fact("Recoveries", f"{len(totals):,}", f"median {duration(statistics.median(totals))}")
        )
    if summary.checkpoints:
        stall = sum(save["stall_seconds"] for save in summary.checkpoints)
        found.append(
            Fact(
                "Checkpoints", f"{len(summary.checkpoints):,}", f"training waited {duration(stall)}"
            )
        )
    if summary.errors:
        found.append(Fact("Errors", f"{len(summary.errors):,}", "listed below"))
    return found


def facts(run: Run) -> list[Fact]:
    """Returns what the last job said about itself when it started."""
    starts = run.of_kind("run_start")
    if not starts:
        return []
    start = starts[-1]
    sizes = [f"{name.upper()} {start[name]}" for name in ("tp", "pp", "ep", "dp") if name in start]
    found = [Fact("Ranks", ", ".join([f"{start['world_size']:,}", *sizes]))]
    if "layers" in start or "num_experts" in start:
        parts = []
        if "layers" in start:
            parts.append(plural(start["layers"], "layer"))
        if "num_experts" in start:
            parts.append(f"{plural(start['num_experts'], 'expert')} a layer")
        found.append(Fact("Model", ", ".join(parts)))
    if "device" in start:
        found.append(Fact("Device", start["device"]))
    for name, key in (("Versions", "versions"), ("Arguments", "args")):
        if start.get(key):
            text = ", ".join(f"{one} {value}" for one, value in start[key].items())
            found.append(Fact(name, text))
    if start.get("patch_digest"):
        found.append(Fact("Patches", start["patch_digest"]))
    return found
