"""Runs a program of tools/reproduce/ in this process, and reads what it wrote."""

import csv
import sys

from tools.reproduce.figure import Figure


def made(module, folder, monkeypatch, *flags):
    """Returns the figure, and the rows of its CSV; that there are some, and a picture, is checked.

    Args:
        module: the program.
        folder: that it writes to.
        monkeypatch: of pytest.
        flags: of the program, beside its folder.
    """
    name = module.__name__.rsplit(".", 1)[-1]
    monkeypatch.setattr(sys, "argv", [name, "--out", str(folder), *flags])
    assert module.main() == 0
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    return Figure.read(folder / f"{name}.json"), rows


def by_what(figure):
    """Returns the rows of a figure's table by what they say."""
    return {row.what: row for row in figure.rows}
