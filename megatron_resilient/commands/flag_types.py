"""Types of flags: what is no such number is refused with a message that says which ones are."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from megatron_resilient.input_files import LEAST_ABOVE_0, MOST

# More than any cluster or model has of anything; beyond it memory ends, not patience.
MOST_COUNTED = 1_000_000


def count(least: int = 1, most: int = MOST_COUNTED) -> Callable[[str], int]:
    """Returns the type of an integer of at least `least` and at most `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is more than {most:,}")
        return value

    return number


def at_least(least: float) -> Callable[[str], float]:
    """Returns the type of a finite number of at least `least`."""
    return _number(least, f"a number of at least {least:g}")


def above_0() -> Callable[[str], float]:
    """Returns the type of a finite number above 0."""
    return _number(LEAST_ABOVE_0, "a number above 0")


def folder(text: str) -> Path:
    """The type of a folder for results: it is made, so that what takes long is not lost."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written to")
    return path


def _number(least: float, what: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not least <= value:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{text[:40]} is more than {MOST:g}")
        return value

    return number
