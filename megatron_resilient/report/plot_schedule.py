"""One pass of a layer, stream by stream: as planned, and as measured."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatron_resilient.report.axes import new_figure
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import significant
from megatron_resilient.telemetry import Event

# Stages that are each other's way back share a colour, the way back in a lighter one.
_LOOKS = {
    "dispatch": ("blue", 0.85),
    "combine": ("blue", 0.45),
    "gradient": ("red", 0.8),
    "allgather": ("orange", 0.85),
    "reducescatter": ("orange", 0.45),
    "expert": ("teal", 0.7),
}
_NUMBERED_DEGREE = 12  # with more chunks, their numbers would not fit


def plot_schedule(event: Event) -> Figure:
    """Draws the lanes of one pass; below them those that were measured, if they were."""
    rows = [
        (f"{stream} {what}", lane)
        for what in ("planned", "measured")
        for stream, lane in (event.get(what) or {}).items()
    ]
    figure, (axes,) = new_figure(0.85 + 0.27 * len(rows))
    for row, (_, lane) in enumerate(rows):
        for stage, chunk, start, end in lane:
            colour, alpha = _LOOKS.get(stage, ("muted", 0.6))
            left, width = 1e3 * start, 1e3 * (end - start)
            axes.barh(
                row,
                width,
                left=left,
                height=0.68,
                color=INK[colour],
                alpha=alpha,
                edgecolor=INK["paper"],
                linewidth=0.8,
            )
            if stage != "gradient" and event["degree"] <= _NUMBERED_DEGREE and width > 0:
                axes.text(
                    left + width / 2,
                    row,
                    str(chunk + 1),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    clip_on=True,
                )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", labelsize=7.0)
    axes.grid(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: significant(value)))
    axes.set_xlabel("milliseconds since the first dispatch; numbers are chunks")
    _legend(axes, {stage for _, lane in rows for stage, *_ in lane})
    axes.set_title(f"layer {event['layer']}, {event['phase']}", color=INK["ink"], pad=9)
    return figure


def _legend(axes: Axes, stages: set[str]) -> None:
    handles = [
        Patch(color=INK[colour], alpha=alpha, label=stage)
        for stage, (colour, alpha) in _LOOKS.items()
        if stage in stages
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.005, 1.0),
        ncols=len(_LOOKS),
        borderaxespad=0.3,
        handlelength=1.0,
        columnspacing=1.2,
        handletextpad=0.5,
    )
