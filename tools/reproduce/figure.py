"""What every figure here does: a CSV, a picture, and a table of the paper's numbers beside ours."""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Compared:
    """One number of the paper, and ours.

    Attributes:
        what: it says.
        paper: None: the paper does not give it.
        ours: the same, by us.
        how: measured, simulated, computed, or calibrated (made to fit: no result).
    """

    what: str
    paper: float | None
    ours: float
    how: str = "simulated"

    @property
    def difference(self) -> float | None:
        """Of ours from the paper's, relative."""
        return None if self.paper is None else self.ours / self.paper - 1


def flags(description: str) -> argparse.ArgumentParser:
    """Returns the parser that all figures share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = ROOT / "runs" / "figures"
    parser.add_argument("--out", type=Path, default=out, help="folder (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=10, help="seeds (default: %(default)s)")
    return parser


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes rows; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def print_table(title: str, rows: Sequence[Compared], notes: Sequence[str] = ()) -> None:
    """Prints paper, ours, difference, and how ours came about."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title)
    for heading in ("paper", "ours", "difference"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        paper = "-" if row.paper is None else f"{row.paper:.2f}"
        difference = "-" if row.difference is None else f"{row.difference:+.0%}"
        table.add_row(row.what, paper, f"{row.ours:.2f}", difference, row.how)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print()


def plot_lines(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    x_label: str,
    y_label: str,
) -> None:
    """Draws one panel for each name, with one line for each system: (x values, y values)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False, layout="constrained"
    )
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for label, (xs, ys) in lines.items():
            axis.plot(xs, ys, label=label)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_label)
    axes[0][0].legend()
    figure.suptitle("simulated")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
