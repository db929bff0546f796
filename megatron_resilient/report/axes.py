"""What all figures share: their size, their axes, and the marks on them."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_resilient.report.run import Mark, Run
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import compact, significant

WIDTH = 9.6  # inches, of 72 units each; the page scales figures to its own width
POINTS = 600  # of a curve: more than that is less than a pixel each
MANY_MARKS = 40  # from here on, lines over the whole height would hide the curve

# The same margins in every figure: what happened at one time stands in one vertical line.
_LEFT, _RIGHT = 0.116, 0.985
_TICK_STEPS = [1, 2, 5, 10]


def new_figure(
    height: float, rows: Sequence[float] = (1.0,), *, head: float = 0.36
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `height` inches with one row of axes for each weight, from the top.

    Args:
        height: Of the whole, in inches.
        rows: Weights of the heights of the axes.
        head: Inches above the first axes, for its title and legend.
    """
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(rows)}
    )
    figure.subplots_adjust(
        left=_LEFT, right=_RIGHT, top=1 - head / height, bottom=0.42 / height, hspace=0.32
    )
    return figure, list(axes[:, 0])


def numbers(axis_of: Axes, which: str = "y") -> None:
    """Writes the ticks of one axis as 120 k."""
    axis = axis_of.yaxis if which == "y" else axis_of.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def step_axis(axes: Axes, first: float, last: float) -> None:
    """Makes the horizontal axis one of training steps."""
    axes.set_xlim(*_with_room(first, last))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=_TICK_STEPS, min_n_ticks=1))
    numbers(axes, "x")
    axes.set_xlabel("training step")


def time_axis(axes: Axes, run: Run) -> float:
    """Makes the horizontal axis one of running time.

    Returns:
        How many seconds one unit of it has.
    """
    total = run.clock.total_seconds
    unit, name = next(
        (seconds, name)
        for seconds, name in (
            (86400, "days"),
            (3600, "hours"),
            (60, "minutes"),
            (1, "seconds"),
            (0.001, "milliseconds"),
        )
        if total >= 3 * seconds or name == "milliseconds"
    )
    axes.set_xlim(*_with_room(0.0, total / unit))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=_TICK_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    stops = ", the stops between jobs left out" if run.clock.stops else ""
    axes.set_xlabel(f"{name} of running time{stops}")
    return unit


def mark(axes: Axes, run: Run, place: Callable[[Mark], float | None]) -> None:
    """Marks failures and resumes along the upper edge of `axes`, recoveries along the lower one."""
    failed = [x for x in map(place, run.failures) if x is not None]
    near = 0.004 * np.ptp(axes.get_xlim())
    for marks, what, symbol, edge, colour in (
        (run.resumes, "job resumed", "v", 1.0, "muted"),
        (run.recoveries, "recovery", "^", 0.0, "teal"),
        (run.failures, "failure", "x", 1.0, "red"),
    ):
        places = [x for x in map(place, marks) if x is not None]
        if not places:
            continue
        if len(places) <= MANY_MARKS:
            for x in places:
                if what == "recovery" and any(abs(x - other) < near for other in failed):
                    continue  # the line of its failure stands there
                axes.axvline(x, color=INK[colour], linewidth=0.6, linestyle=(0, (3, 2)), zorder=1)
        axes.plot(
            places,
            [edge] * len(places),
            linestyle="none",
            marker=symbol,
            markersize=5,
            color=INK[colour],
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
            label=what,
        )


def up_from_zero(axes: Axes, values: Sequence[float], which: str = "y") -> None:
    """Makes one axis go from zero to past the greatest of `values`, or to 1 if there is none."""
    top = float(max(values, default=0.0)) or 1.0
    if which == "y":
        axes.set_ylim(0, 1.12 * top)
    else:
        axes.set_xlim(0, 1.12 * top)
    numbers(axes, which)


def title(axes: Axes, text: str, legend: bool = True) -> None:
    """Writes what the vertical axis shows above it, and the legend to its right."""
    axes.set_title(text, color=INK["ink"], pad=9)
    handles, _ = axes.get_legend_handles_labels()
    if legend and handles:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.005, 1.0),
            ncols=len(handles),
            borderaxespad=0.3,
            handlelength=1.4,
            columnspacing=1.4,
            handletextpad=0.5,
        )


def _with_room(first: float, last: float) -> tuple[float, float]:
    room = 0.01 * (last - first) or 0.5
    return first - room, last + room
