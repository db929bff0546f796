"""The picture of a replay: samples over time, and when nodes went and came."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_resilient.simulation.trace import Trace

_COLOURS = {"ours": "tab:blue", "restart": "tab:orange"}


def plot(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], trace: Trace) -> None:
    """Draws one curve for each system: (seconds, samples)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for name, points in curves.items():
        seconds, samples = zip(*points, strict=True)
        axis.plot(seconds, samples, label=name, color=_COLOURS.get(name), drawstyle="steps-post")
    top = max(samples for points in curves.values() for _, samples in points)
    for change in trace.changes:
        gone, came = len(change.lost) + len(change.left), len(change.joined)
        text = " ".join([f"-{gone}"] * bool(gone) + [f"+{came}"] * bool(came))
        colour = "tab:red" if gone else "tab:green"
        axis.axvline(change.seconds, color=colour, linewidth=0.8, alpha=0.6)
        axis.text(change.seconds, 1.04 * top, text, color=colour, ha="center", fontsize=8)
    axis.set_ylim(0, 1.12 * top)
    axis.set_xlabel("seconds")
    axis.set_ylabel("samples that count")
    axis.set_title("measured: ten emulated nodes on one machine", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", bbox_to_anchor=(0, 0.92))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
