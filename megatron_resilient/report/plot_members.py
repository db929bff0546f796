"""Members over time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_resilient.report.axes import mark, new_figure, time_axis, title
from megatron_resilient.report.members import Membership
from megatron_resilient.report.run import Run
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import shorten

MAX_ROWS = 40  # of nodes with a row each; with more, only how many there are is drawn


def plot_members(run: Run, membership: Membership) -> Figure:
    """Draws how many members there are and, of few enough nodes, when each was one."""
    names = list(dict.fromkeys(stay.member for stay in membership.stays))
    rows = len(names) if len(names) <= MAX_ROWS else 0
    if rows:
        below = 0.17 * rows + 0.1
        figure, axes = new_figure(2.1 + below, (1.35, below))
    else:
        figure, axes = new_figure(2.3)
    unit = time_axis(axes[-1], run)
    _counts(axes[0], run, membership, unit)
    mark(axes[0], run, lambda mark: mark.time / unit)
    title(axes[0], f"{membership.unit} in the job")
    if rows:
        axes[0].set_xlabel("")
        _stays(axes[1], run, membership, names, unit)
        title(axes[1], "node")
    return figure


def _counts(axes: Axes, run: Run, membership: Membership, unit: float) -> None:
    times, counts = zip(*membership.counts, strict=True)
    x = np.append(run.clock(times), run.clock.total_seconds) / unit
    y = np.append(counts, counts[-1])
    axes.fill_between(x, y, step="post", color=INK["blue"], alpha=0.12, linewidth=0)
    axes.plot(x, y, drawstyle="steps-post", color=INK["blue"])
    axes.set_ylim(0, 1.12 * max(1, max(counts)))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))


def _stays(axes: Axes, run: Run, membership: Membership, names: list[str], unit: float) -> None:
    row = {name: index for index, name in enumerate(names)}
    for stay in membership.stays:
        start, end = run.clock([stay.start, stay.end]) / unit
        y = row[stay.member]
        axes.barh(y, end - start, left=start, height=0.52, color=INK["blue"], alpha=0.55)
        if stay.how == "failed":
            axes.plot(end, y, marker="x", markersize=5, color=INK["red"], clip_on=False)
        elif stay.how == "planned":
            axes.plot(end, y, marker=">", markersize=4.5, color=INK["orange"], clip_on=False)
    axes.grid(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), [shorten(name, 12) for name in names])
    hows = {stay.how for stay in membership.stays}
    for how, symbol, colour, text in (
        ("failed", "x", "red", "failed"),
        ("planned", ">", "orange", "left as planned"),
    ):
        if how in hows:
            axes.plot(
                [], [], linestyle="none", marker=symbol, markersize=5, color=INK[colour], label=text
            )
