"""Which expert is in which slot."""

import numpy as np
from matplotlib.figure import Figure

from megatron_resilient.report.axes import WIDTH, title
from megatron_resilient.report.placement import LayerPlacement
from megatron_resilient.report.plot_load import UNEVEN
from megatron_resilient.report.svg import INK

MAX_LAYERS = 6
# Above this the numbers of experts cannot be read any more.
_NUMBERED_SLOTS = 160


def plot_placement(placement: dict[int, LayerPlacement]) -> Figure:
    """Draws ranks over slots: the number of the expert, coloured by its replicas."""
    shown = _spread(list(placement), MAX_LAYERS)
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    tallest = max(len(placement[layer].slots) for layer in shown)
    height = 0.45 + min(3.0, max(0.8, 0.24 * tallest))
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    most = max(max(placement[layer].replicas.values()) for layer in shown)
    darkest = max(4, most)
    for axes, layer in zip(panels, shown, strict=False):
        own = placement[layer]
        counts = np.array([[own.replicas[expert] for expert in slots] for slots in own.slots])
        ranks, slots = counts.shape
        edges = np.arange(slots + 1) - 0.5, np.arange(ranks + 1) - 0.5
        # Not imshow: equal images get equal ids, and ids may stand once only in a page.
        axes.pcolormesh(
            *edges, counts, cmap=UNEVEN, vmin=1, vmax=darkest, edgecolors=INK["paper"], lw=0.8
        )
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_xticks([])
        axes.set_yticks(range(len(own.slots)) if len(own.slots) <= 16 else [])
        axes.tick_params(length=0)
        axes.set_ylabel("rank")
        title(axes, f"layer {layer}: expert in each slot")
        if counts.size > _NUMBERED_SLOTS:
            continue
        for rank, experts in enumerate(own.slots):
            for slot, expert in enumerate(experts):
                dark = counts[rank, slot] > 0.6 * darkest
                colour = "#ffffff" if dark else "#222222"
                axes.text(slot, rank, str(expert), ha="center", va="center", color=colour)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel(f"colour: replicas of the expert, 1 to {most}", color=INK["muted"], fontsize=8)
    return figure


def _spread(layers: list[int], count: int) -> list[int]:
    """Returns at most `count` layers, the first and the last among them."""
    if len(layers) <= count:
        return layers
    chosen = np.linspace(0, len(layers) - 1, count).round().astype(int)
    return [layers[index] for index in chosen]
