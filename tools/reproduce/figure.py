"""What every figure here does: a CSV, a picture, and a table of the paper's numbers beside ours."""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from megatron_resilient.commands.flag_types import count, folder

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs" / "figures"
# Beyond this a difference from the paper must have a reason.
EXPLAINED_FROM = 0.10

# measured: real processes did it, here. simulated: an event simulator, or random draws, did it.
# computed: a formula or an algorithm gives it, from its inputs alone. calibrated: made to fit the
# paper, and so no result.
How = Literal["measured", "simulated", "computed", "calibrated"]


@dataclass(frozen=True)
class Compared:
    """One number of the paper, and ours.

    Attributes:
        what: it says, with its unit.
        paper: None: the paper does not give it.
        ours: the same, by us.
        how: ours came about.
        why: they differ; needed where they differ by more than a tenth.
    """

    what: str
    paper: float | None
    ours: float
    how: How
    why: str = ""

    def __post_init__(self) -> None:
        assert self.how in get_args(How), self.how
        differs = self.difference is not None and abs(self.difference) > EXPLAINED_FROM
        if differs and self.how != "calibrated" and not self.why:
            raise ValueError(
                f"{self.what}: {self.ours:.4g} here, {self.paper} in the paper: say why they differ"
            )

    @property
    def difference(self) -> float | None:
        """Of ours from the paper's, relative; None if there is none to compare with."""
        return self.ours / self.paper - 1 if self.paper else None

    def cells(self) -> tuple[str, str, str, str, str]:
        """Returns what, the paper's number, ours, their difference, how: as text."""
        paper = "-" if self.paper is None else number(self.paper)
        difference = "-" if self.difference is None else f"{self.difference:+.1%}"
        return self.what, paper, number(self.ours), difference, self.how


@dataclass(frozen=True)
class Figure:
    """What a program here has to say; `publish` prints it, and keeps it for docs/figures.md.

    Attributes:
        name: of the program; its CSV and picture have it too.
        title: the paper, and its section, figure or table.
        text: what it shows and how, in a few sentences.
        rows: of its table.
        notes: what the reader should know, one paragraph each.
        pictures: names of files in the folder that it wrote to.
    """

    name: str
    title: str
    text: str
    rows: tuple[Compared, ...]
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Figure":
        """Returns one that `publish` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Compared(**row) for row in values.pop("rows"))
        tuples = {name: tuple(values.pop(name)) for name in ("notes", "pictures")}
        return cls(rows=rows, **tuples, **values)


def number(value: float) -> str:
    """Returns a number with three digits, or all those before its point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def flags(description: str, draws: int | None = None) -> argparse.ArgumentParser:
    """Returns the parser that all figures share; with `--draws` if there is a number of them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=folder, default=OUT, help="folder (default: %(default)s)")
    if draws is not None:
        parser.add_argument(
            "--draws", type=count(), default=draws, help="seeds (default: %(default)s)"
        )
    return parser


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes rows; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def publish(out: Path, figure: Figure) -> None:
    """Prints the table, and writes NAME.json into the folder."""
    for picture in figure.pictures:
        assert (out / picture).is_file(), picture
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(figure.title)
    for heading in ("paper", "ours", "difference"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in figure.rows:
        table.add_row(*row.cells())
    console.print(table)
    for note in (*dict.fromkeys(row.why for row in figure.rows if row.why), *figure.notes):
        console.print(note, soft_wrap=True)
    console.print()
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(figure), indent=1) + "\n"
    (out / f"{figure.name}.json").write_text(text, encoding="utf-8")


def plot_lines(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    x_label: str,
    y_label: str,
    how: How = "simulated",
) -> None:
    """Draws one panel for each name, with one line for each system: (x values, y values)."""
    picture, axes = _panels(len(panels), how)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, (xs, ys) in lines.items():
            axis.plot(xs, ys, label=label)
        axis.set_title(title)
        axis.set_xlabel(x_label)
    axes[0].set_ylabel(y_label)
    _legend(picture, axes)
    _save(picture, path)


def plot_bars(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    y_label: str,
    how: How = "simulated",
) -> None:
    """Draws one panel for each name: groups of bars, {label of the series: {group: height}}."""
    picture, axes = _panels(len(panels), how)
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        groups = list(dict.fromkeys(group for heights in series.values() for group in heights))
        width = 0.8 / len(series)
        for place, (label, heights) in enumerate(series.items()):
            xs = [groups.index(group) - 0.4 + width * (place + 0.5) for group in heights]
            axis.bar(xs, list(heights.values()), width, label=label)
        axis.set_xticks(range(len(groups)), groups)
        axis.set_title(title)
    axes[0].set_ylabel(y_label)
    _legend(picture, axes)
    _save(picture, path)


def _panels(count: int, how: How) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(
        1, count, figsize=(max(5.0, 4.0 * count), 3.2), squeeze=False, layout="constrained"
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    picture.suptitle(how)
    return picture, axes[0]


def _legend(picture: Any, axes: Any) -> None:
    """Puts one legend below all panels; of each label what the first panel has that shows it."""
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if not isinstance(handle, Sized) or len(handle):  # bars may be none here
                shown.setdefault(label, handle)
    picture.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=1 + len(axes))


def _save(picture: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
