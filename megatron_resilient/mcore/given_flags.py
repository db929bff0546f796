"""The flags that this run was given, as plain values: what it takes to build its model again."""

import argparse
import os
from enum import Enum
from typing import Any

# Of this process, or of this machine.
_LEFT_OUT = ("rank", "local_rank")

_given: dict[str, Any] = {}


def note(args: argparse.Namespace) -> None:
    """Remembers flags as they were parsed; Megatron's validation completes and changes them."""
    global _given
    _given = plain(args)


def given() -> dict[str, Any]:
    """Returns what was noted last."""
    return dict(_given)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what JSON can say of flags; enums by name, flags that are None not at all."""
    found = {}
    for name, value in sorted(vars(args).items()):
        value = value.name if isinstance(value, Enum) else value
        if _is_plain(value) and not name.startswith("_") and name not in _LEFT_OUT:
            found[name] = _listed(value)
    found["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
    return found


def _listed(value: Any) -> Any:
    """Returns a value as JSON gives it back: tuples are lists there."""
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    # The manifest has no place for infinities.
    return isinstance(value, str | bool | int) or (isinstance(value, float) and abs(value) < 1e300)
