"""Megatron's flags that do not go with one of ours: tables of them, and one line for each."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from megatron_resilient.errors import ConfigError

# (attribute, is it in the way?, why)
Refusal = tuple[str, Callable[[Any], bool], str]


def is_set(value: Any) -> bool:
    """Tells whether a flag was given a value, or switched on."""
    return value is not None and value is not False


def other_than(*usual: Any) -> Callable[[Any], bool]:
    """Returns what tells whether a flag has another value than these."""
    return lambda value: value is not None and value not in usual


def listed(value: Any) -> tuple[Any, ...]:
    """Returns the values of a flag that may have several."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def refuse(args: argparse.Namespace, flag: str, refusals: Iterable[Refusal]) -> None:
    """Refuses what is in the way of `flag`.

    Raises:
        ConfigError: names both flags, and why.
    """
    for name, in_the_way, why in refusals:
        value = getattr(args, name, None)
        if in_the_way(value):
            said = " ".join(map(str, listed(value)))
            raise ConfigError(f"--{name.replace('_', '-')} {said} with {flag}: {why}")
