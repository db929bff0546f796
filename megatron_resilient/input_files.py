"""Reads small files that people write; whatever is wrong with one is an error of ours."""

import json
from pathlib import Path
from typing import Any

from megatron_resilient.errors import ResilientError

# No time, size, rate or count of any cluster is beyond these; products of some of them are finite.
MOST = 1e18
LEAST_ABOVE_0 = 1e-18
# Of all nodes and one layer. More slots than of 100,000 nodes with 100 each take too much memory.
MOST_SLOTS = 10_000_000


def read_text(path: str | Path, error: type[ResilientError]) -> str:
    """Returns the text of a file; the mark that Windows puts in front is left out.

    Args:
        path: of the file.
        error: raised if it is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"{path}: no text in UTF-8, from byte {problem.start} on: save it as UTF-8"
        ) from None


def read_json(path: str | Path, error: type[ResilientError]) -> Any:
    """Returns the document of a JSON file.

    Args:
        path: of the file.
        error: raised if it is none.
    """
    text = read_text(path, error)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not JSON: {problem}") from None


def is_number(value: object) -> bool:
    """Whether a value of a JSON document is a number that can be computed with: up to `MOST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST
