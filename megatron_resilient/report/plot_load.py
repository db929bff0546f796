"""Expert loads: how uneven, in which layers, and which experts."""

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron_resilient.report.axes import WIDTH, mark, new_figure, step_axis, title
from megatron_resilient.report.loads import ExpertLoads, Floats, mean_of_known
from megatron_resilient.report.run import Run
from megatron_resilient.report.svg import INK
from megatron_resilient.report.text import compact, times

MAX_PANELS = 12
_PANELS_A_ROW = 4

# Blue to orange over grey: told apart by all common kinds of colour vision, and visible on a light
# and on a dark page. Grey is the mean in both.
_LESS, _MORE = ["#053f7d", "#4a90c9", "#d8d8d4"], ["#d8d8d4", "#e8913c", "#8c3b04"]
RELATIVE = LinearSegmentedColormap.from_list("relative", [*_LESS, *_MORE[1:]])
UNEVEN = LinearSegmentedColormap.from_list("uneven", _MORE)


def plot_imbalance(run: Run, loads: ExpertLoads) -> Figure:
    """Draws max / mean load over steps: of the layers' experts, and of the ranks if known."""
    figure, (axes,) = new_figure(2.6)
    edges = np.linspace(loads.first_step, loads.last_step, loads.imbalance.shape[1] + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    known = np.isfinite(loads.imbalance).any(axis=0)
    x = centres[known]
    highest = np.nanmax(loads.imbalance[:, known], axis=0)
    lowest = np.nanmin(loads.imbalance[:, known], axis=0)
    marker = "o" if x.size == 1 else None
    mean = mean_of_known(loads.imbalance, axis=0)[known]
    if len(loads.layers) > 1:
        lines = [(highest, "most uneven layer", "orange"), (mean, "mean of layers", "blue")]
        axes.fill_between(x, lowest, highest, color=INK["blue"], alpha=0.12, linewidth=0)
    else:
        lines = [(mean, "experts", "blue")]
    if loads.rank_imbalance is not None:
        of_ranks = mean_of_known(loads.rank_imbalance, axis=0)[known]
        lines.append((of_ranks, "ranks", "teal"))
    for values, label, colour in lines:
        axes.plot(x, values, color=INK[colour], label=label, marker=marker, markersize=4)
    top = float(np.max(highest))
    if top > 3:  # so that what is close to even can be told apart as well
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0.96, top * 1.06)
    else:
        axes.set_ylim(1.0 - 0.03 * (top - 1.0), max(1.01, top + 0.06 * (top - 1.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: times(value)))
    step_axis(axes, loads.first_step, loads.last_step)
    mark(axes, run, lambda mark: mark.step)
    title(axes, "max / mean load")
    return figure


def plot_layers(loads: ExpertLoads) -> Figure:
    """Draws max / mean load of every layer over steps as a heat map."""
    figure, (axes,) = new_figure(1.1 + min(3.6, 0.16 * len(loads.layers)))
    top = float(np.nanquantile(loads.imbalance, 0.99))
    norm = Normalize(1.0, max(top, 1.01))
    _heat_map(axes, loads, loads.imbalance, UNEVEN, norm)
    axes.set_ylim(len(loads.layers) - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(min(12, len(loads.layers)), integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda row, _: _entry(loads.layers, row)))
    step_axis(axes, loads.first_step, loads.last_step)
    axes.set_xlim(loads.first_step, loads.last_step)
    title(axes, "layer")
    _scale(figure, UNEVEN, norm, "max / mean load", times)
    return figure


def chosen_layers(loads: ExpertLoads) -> list[int]:
    """Returns the indices of the layers to draw: all, or some evenly spaced and the worst."""
    count = len(loads.layers)
    if count <= MAX_PANELS:
        return list(range(count))
    worst = int(np.nanargmax(loads.typical_imbalance()))
    even = {round(index) for index in np.linspace(0, count - 1, MAX_PANELS)}
    if worst not in even:
        even.discard(min(even - {0, count - 1}, key=lambda index: abs(index - worst)))
    return sorted(even | {worst})


def plot_experts(loads: ExpertLoads) -> Figure:
    """Draws the load of each expert over steps, one heat map a layer."""
    chosen = chosen_layers(loads)
    across = min(_PANELS_A_ROW, len(chosen))
    down = -(-len(chosen) // across)
    height = 0.85 + 1.35 * down
    figure = Figure(figsize=(WIDTH, height))
    panels = figure.subplots(down, across, sharex=True, squeeze=False)
    figure.subplots_adjust(
        left=0.05,
        right=0.985,
        top=1 - 0.5 / height,
        bottom=0.42 / height,
        hspace=0.34,
        wspace=0.16,
    )
    norm = Normalize(-2, 2)
    for place, axes in enumerate(panels.flat):
        if place >= len(chosen):
            axes.set_axis_off()
            continue
        index = chosen[place]
        # An expert without tokens is at the end of the scale.
        logarithm = np.log2(np.maximum(loads.relative[index], 2.0**-9))
        experts = loads.relative[index].shape[0]
        _heat_map(axes, loads, logarithm, RELATIVE, norm)
        axes.set_ylim(experts - 0.5, -0.5)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axes.tick_params(labelsize=7, labelbottom=place + across >= len(chosen))
        axes.set_title(f"layer {loads.layers[index]}", fontsize=8, pad=3)
    figure.supxlabel("training step", fontsize=8, color=INK["muted"], y=0.04 / height)
    figure.text(0.008, 1 - 0.16 / height, "expert", va="center")
    _scale(figure, RELATIVE, norm, "load / mean load", lambda value: times(2**value))
    return figure


def _heat_map(
    axes: Axes,
    loads: ExpertLoads,
    values: Floats,
    colours: LinearSegmentedColormap,
    norm: Normalize,
) -> None:
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.imshow(
        np.ma.masked_invalid(values),
        cmap=colours,
        norm=norm,
        aspect="auto",
        interpolation="none",
        extent=(loads.first_step, loads.last_step, values.shape[0] - 0.5, -0.5),
    )


def _entry(layers: list[int], row: float) -> str:
    return str(layers[int(row)]) if row == int(row) and 0 <= row < len(layers) else ""


def _scale(
    figure: Figure,
    colours: LinearSegmentedColormap,
    norm: Normalize,
    text: str,
    tick: Callable[[float], str],
) -> None:
    """Draws the colours of a heat map at the upper right of its figure."""
    height = figure.get_figheight()
    axes = figure.add_axes((0.765, 1 - 0.27 / height, 0.18, 0.09 / height))
    low, high = float(norm.vmin), float(norm.vmax)  # type: ignore[arg-type]
    axes.imshow(
        np.linspace(low, high, 64)[None, :],
        cmap=colours,
        norm=norm,
        aspect="auto",
        interpolation="none",
    )
    axes.set_axis_off()
    for x, words, side in ((-0.03, f"{text}   {tick(low)}", "right"), (1.03, tick(high), "left")):
        axes.text(
            x, 0.5, words, transform=axes.transAxes, ha=side, va="center_baseline", fontsize=8
        )
