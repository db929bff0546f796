"""Recoveries by phase, checkpoints, and the timeline of all other events."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_resilient.report.axes import (
    mark,
    new_figure,
    step_axis,
    time_axis,
    title,
    up_from_zero,
)
from megatron_resilient.report.run import Run
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import duration, shorten
from megatron_resilient.telemetry import KINDS, Event, number

MAX_BARS = 24
MAX_LANES = 20

# Okabe and Ito's colours (2008), made to be told apart by all common kinds of colour vision.
PHASE_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#999999")

# Other sections show these already.
_NOT_IN_TIMELINE = frozenset(
    {"step", "expert_load", "placement", "checkpoint_save_start", "evaluation"}
)

_LOOKS = {
    "failure": ("x", "red"),
    "error": ("X", "red"),
    "recovery": ("^", "teal"),
    "member_join": (">", "teal"),
    "member_leave": ("<", "orange"),
    "rebalance": ("d", "blue"),
    "checkpoint_saved": ("s", "violet"),
    "checkpoint_loaded": ("D", "violet"),
}


def slowest_recoveries(run: Run) -> list[Event]:
    """Returns the recoveries to draw, in order: all, or the slowest ones."""
    recoveries = run.summary.recoveries
    slowest = sorted(recoveries, key=lambda recovery: -recovery["total_seconds"])[:MAX_BARS]
    return [recovery for recovery in recoveries if any(recovery is one for one in slowest)]


def phases_of(run: Run) -> list[str]:
    """Returns the names of the phases of all recoveries, in the order in which they first stand."""
    return list(dict.fromkeys(name for one in run.summary.recoveries for name in one["seconds"]))


def plot_recoveries(run: Run) -> Figure:
    """Draws the phases of each recovery, one after the other."""
    recoveries = slowest_recoveries(run)
    figure, (axes,) = new_figure(0.85 + 0.24 * len(recoveries))
    rows = np.arange(len(recoveries))
    left = np.zeros(len(recoveries))
    for index, phase in enumerate(phases_of(run)):
        width = np.array([number(one["seconds"].get(phase, 0.0)) for one in recoveries])
        width = np.where(np.isfinite(width), width, 0.0)
        colour = PHASE_COLOURS[min(index, len(PHASE_COLOURS) - 1)]
        axes.barh(
            rows,
            width,
            left=left,
            height=0.62,
            color=colour,
            label=shorten(phase.replace("_", " "), 20),
        )
        left += width
    for row, end, recovery in zip(rows, left, recoveries, strict=True):
        axes.annotate(
            duration(recovery["total_seconds"]),
            (end, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.grid(axis="x")
    axes.grid(False, axis="y")
    axes.set_yticks(
        rows, ["" if one["step"] is None else f"step {one['step']:,}" for one in recoveries]
    )
    axes.set_ylim(len(recoveries) - 0.4, -0.6)
    up_from_zero(axes, left.tolist(), "x")
    axes.set_xlabel("seconds")
    title(axes, "")
    return figure


def plot_checkpoints(run: Run) -> Figure:
    """Draws, for each save, how long training waited and how long it took to be complete."""
    figure, (above, below) = new_figure(3.1, (1, 1))
    saves = [save for save in run.summary.checkpoints if save["step"] is not None]
    steps = np.array([save["step"] for save in saves], dtype=float)
    _stems(above, steps, [save["stall_seconds"] for save in saves], "orange")
    _stems(below, steps, [save["seconds"] for save in saves], "violet")
    step_axis(below, float(steps.min()), float(steps.max()))
    if run.done.step.size:
        step_axis(below, float(run.done.step.min()), float(run.done.step.max()))
    mark(above, run, lambda mark: mark.step)
    title(above, "seconds that training waited")
    title(below, "seconds until the save was complete")
    return figure


def _stems(axes: Axes, x: np.ndarray, y: list[float], colour: str) -> None:
    few = x.size <= 200
    axes.vlines(x, 0, y, color=INK[colour], linewidth=1.6 if few else 0.7)
    if few:
        axes.plot(x, y, linestyle="none", marker="o", markersize=3.6, color=INK[colour])
    up_from_zero(axes, y)
    axes.locator_params(axis="y", nbins=4)


def timeline_events(run: Run) -> list[Event]:
    """Returns the events that a timeline shows, in order."""
    return [event for event in run.events if event["event"] not in _NOT_IN_TIMELINE]


def plot_timeline(run: Run) -> Figure:
    """Draws all events but the frequent ones, a row for each kind."""
    events = timeline_events(run)
    present = {event["event"] for event in events}
    lanes = [kind for kind in KINDS if kind in present]
    lanes += sorted(present - set(lanes))[: MAX_LANES - len(lanes)]
    figure, (axes,) = new_figure(0.55 + 0.2 * len(lanes), head=0.1)
    unit = time_axis(axes, run)
    for row, kind in enumerate(lanes):
        times = np.array([event["time"] for event in events if event["event"] == kind])
        symbol, colour = _LOOKS.get(kind, ("o", "muted"))
        axes.plot(
            run.clock(times) / unit,
            np.full(times.size, row),
            linestyle="none",
            marker=symbol,
            markersize=5,
            color=INK[colour],
        )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [shorten(kind.replace("_", " "), 18) for kind in lanes])
    axes.tick_params(axis="y", labelsize=7.8)
    return figure
