"""Loss over steps, throughput over time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from megatron_resilient.report.axes import (
    POINTS,
    mark,
    new_figure,
    step_axis,
    time_axis,
    title,
    up_from_zero,
)
from megatron_resilient.report.run import Run
from megatron_resilient.report.series import (
    Line,
    StepSeries,
    main_loss,
    thin_out,
)
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import significant


def plot_loss(run: Run) -> Figure:
    """Draws the loss over steps: what counts, what was rolled back, and the evaluations."""
    figure, (axes,) = new_figure(3.3)
    done = run.done
    evaluations = [event for event in run.of_kind("evaluation") if event["step"] is not None]
    label = "training" if evaluations or run.lost else None
    _draw(axes, thin_out(done.step.astype(float), done.loss, POINTS), "blue", label)
    span = int(np.ptp(done.step)) + 1
    for index, lost in enumerate(run.lost):
        # As smooth as the curve beside it.
        points = max(2, POINTS * lost.step.size // span)
        line = thin_out(lost.step.astype(float), lost.loss, points)
        label = "rolled back" if index == 0 else None
        axes.axvspan(lost.step[0], lost.step[-1], color=INK["muted"], alpha=0.13, linewidth=0)
        axes.plot(line.x, line.mean, color=INK["muted"], linewidth=1.0, zorder=1.5, label=label)
    if evaluations:
        axes.plot(
            [event["step"] for event in evaluations],
            [main_loss(event) for event in evaluations],
            linestyle="none",
            marker="o",
            markersize=4,
            markerfacecolor=INK["paper"],
            markeredgecolor=INK["orange"],
            markeredgewidth=1.2,
            zorder=3,
            label="evaluation",
        )
    _loss_scale(axes, done)
    bad = done.skipped | ~np.isfinite(done.loss)
    if bad.any():
        axes.plot(
            done.step[bad],
            np.full(bad.sum(), 0.03),
            linestyle="none",
            marker="|",
            markersize=6,
            color=INK["orange"],
            transform=axes.get_xaxis_transform(),
            label="skipped or not finite",
        )
    step_axis(axes, float(done.step.min()), float(done.step.max()))
    mark(axes, run, lambda mark: mark.step)
    title(axes, "loss")
    return figure


def plot_throughput(run: Run) -> Figure:
    """Draws tokens per second over running time, in all steps, rolled back or not."""
    figure, (axes,) = new_figure(2.5)
    unit = time_axis(axes, run)
    series = [run.done, *run.lost]
    times = np.concatenate([steps.time for steps in series])
    rates = np.concatenate([steps.tokens_per_second for steps in series])
    line = thin_out(run.clock(times) / unit, rates, POINTS)
    _draw(axes, line, "blue", None)
    median = run.summary.tokens_per_second
    if median is not None:
        axes.axhline(
            median, color=INK["orange"], linewidth=1.0, linestyle=(0, (4, 3)), label="median"
        )
    up_from_zero(axes, [*line.high, median or 0.0])
    mark(axes, run, lambda mark: mark.time / unit)
    title(axes, "tokens per second")
    return figure


def _draw(axes: Axes, line: Line, colour: str, label: str | None) -> None:
    if not line.exact:
        axes.fill_between(line.x, line.low, line.high, color=INK[colour], alpha=0.22, linewidth=0)
    marker = "o" if line.x.size == 1 else None
    axes.plot(line.x, line.mean, color=INK[colour], marker=marker, markersize=4, label=label)


def _loss_scale(axes: Axes, done: StepSeries) -> None:
    """Takes a logarithmic scale where a linear one would show only how fast the loss fell first."""
    finite = done.loss[np.isfinite(done.loss)]
    if finite.size and finite.min() > 0 and finite.max() > 3 * finite.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
