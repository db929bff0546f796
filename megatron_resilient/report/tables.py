"""The tables of the page."""

import json
from collections.abc import Callable, Iterable
from itertools import compress

from megatron_resilient.report.content import Column, Table
from megatron_resilient.report.placement import LayerPlacement
from megatron_resilient.report.plot_events import phases_of, timeline_events
from megatron_resilient.report.run import Run
from megatron_resilient.report.text import duration, in_bytes, moment, plural
from megatron_resilient.telemetry import COMMON, Event, number

MAX_ROWS = 500
_COMMON_NAMES = frozenset(entry.name for entry in COMMON)


def jobs_table(run: Run) -> Table:
    """Lists the jobs of the run."""
    return _table(
        "Jobs",
        (
            Column("started", "name"),
            Column("ran for"),
            Column("ranks"),
            Column("first step"),
            Column("last step"),
            Column("exit", "name"),
        ),
        run.summary.segments,
        lambda job: (
            moment(job["start_time"]),
            duration(job["end_time"] - job["start_time"]),
            f"{job['world_size']:,}",
            _step(job["first_step"]),
            _step(job["last_step"]),
            "no end written" if job["exit"] is None else str(job["exit"]),
        ),
    )


def placement_table(placement: dict[int, LayerPlacement]) -> Table:
    """Lists how many replicas each expert has."""
    return _table(
        "Replicas",
        (Column("layer"), Column("slots"), Column("fewest"), Column("most"), Column("hot", "text")),
        placement.items(),
        lambda item: (
            str(item[0]),
            f"{sum(map(len, item[1].slots)):,}",
            str(min(item[1].replicas.values())),
            str(max(item[1].replicas.values())),
            ", ".join(f"expert {expert}: {count}" for expert, count in item[1].most_replicated(4)),
        ),
    )


def rebalances_table(run: Run) -> Table:
    """Lists when experts were placed anew, and what came of it."""
    return _table(
        "Rebalancings",
        (
            Column("step"),
            Column("max / mean before"),
            Column("predicted after"),
            Column("moved"),
            Column("training waited"),
        ),
        run.of_kind("rebalance"),
        lambda event: (
            _step(event["step"]),
            f"{event['imbalance_before']:.3f}" if "imbalance_before" in event else "",
            f"{event['imbalance_after']:.3f}" if "imbalance_after" in event else "",
            in_bytes(event["bytes"]) if "bytes" in event else "",
            duration(event["seconds"]) if "seconds" in event else "",
        ),
        folded=True,
    )


def recoveries_table(run: Run) -> Table:
    """Lists the recoveries with the seconds of each phase."""
    phases = phases_of(run)
    return _table(
        "Recoveries",
        (
            Column("time", "name"),
            Column("step"),
            Column("generation"),
            Column("ranks after"),
            Column("state from", "name"),
            Column("total"),
            *(Column(phase.replace("_", " ")) for phase in phases),
        ),
        run.summary.recoveries,
        lambda one: (
            moment(one["time"]),
            _step(one["step"]),
            str(one["generation"]),
            f"{one['world_size']:,}" if "world_size" in one else "",
            str(one.get("source", "")),
            _seconds(one["total_seconds"]),
            *(_seconds(one["seconds"].get(phase)) for phase in phases),
        ),
    )


def checkpoints_table(run: Run) -> Table:
    """Lists the saves."""
    return _table(
        "Checkpoints",
        (
            Column("time", "name"),
            Column("step"),
            Column("stall"),
            Column("complete after"),
            Column("size"),
            Column("kind", "name"),
            Column("path", "text"),
        ),
        run.summary.checkpoints,
        lambda save: (
            moment(save["time"]),
            _step(save["step"]),
            _seconds(save["stall_seconds"]),
            _seconds(save["seconds"]),
            in_bytes(save["bytes"]) if "bytes" in save else "",
            {True: "asynchronous", False: "synchronous", None: ""}[save.get("asynchronous")],
            save["path"],
        ),
        folded=len(run.summary.checkpoints) > 12,
    )


def errors_table(run: Run) -> Table:
    """Lists the errors."""
    return _table(
        "Errors",
        (
            Column("time", "name"),
            Column("step"),
            Column("writer", "name"),
            Column("type", "name"),
            Column("message", "text"),
        ),
        run.summary.errors,
        lambda error: (
            moment(error["time"]),
            _step(error["step"]),
            _writer(error),
            str(error.get("type", "")),
            error["message"],
        ),
    )


def events_table(run: Run) -> Table:
    """Lists the events of the timeline with all their fields."""
    events = timeline_events(run)
    return _table(
        f"{plural(len(events), 'event')} of the timeline",
        (
            Column("time", "name"),
            Column("step"),
            Column("generation"),
            Column("writer", "name"),
            Column("event", "name"),
            Column("fields", "text"),
        ),
        events,
        lambda event: (
            moment(event["time"]),
            _step(event["step"]),
            str(event["generation"]),
            _writer(event),
            event["event"].replace("_", " "),
            _fields(event),
        ),
        folded=True,
    )


def _table[Entry](
    caption: str,
    columns: tuple[Column, ...],
    entries: Iterable[Entry],
    row: Callable[[Entry], tuple[str, ...]],
    folded: bool = False,
) -> Table:
    entries = list(entries)
    rows = [row(entry) for entry in entries[-MAX_ROWS:]]
    # A column that no row fills says nothing.
    known = [any(cells) for cells in zip(*rows, strict=True)]
    return Table(
        caption,
        tuple(compress(columns, known)),
        [tuple(compress(cells, known)) for cells in rows],
        len(entries) - len(rows),
        folded,
    )


def _step(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


def _seconds(seconds: float | str | None) -> str:
    return "" if seconds is None else duration(number(seconds))


def _writer(event: Event) -> str:
    rank = "" if event["rank"] is None else f"rank {event['rank']}"
    return " ".join(filter(None, (rank, event.get("node"))))


def _fields(event: Event) -> str:
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in event.items()
        if name not in _COMMON_NAMES
    )
