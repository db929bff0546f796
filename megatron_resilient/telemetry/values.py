"""Values as they stand in JSON: what it has no number for is text, `nan`, `inf` or `-inf`."""

import math
import sys
from typing import Any

NON_FINITE = frozenset({"nan", "inf", "-inf"})


def encode(value: object, name: str) -> Any:
    """Returns `value` as valid JSON can hold it.

    Args:
        value: None, bool, int, float, str, or a list, tuple or dict (with str keys) of these.
        name: How an error calls the value, such as `loss[lm loss]`.

    Raises:
        TypeError: A value of another type. A numpy or torch scalar is one: its `.item()` may wait
            for a device, which a log must not do unseen.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return [encode(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{name}: the key {key!r} is a {type(key).__name__}; use str")
        return {key: encode(item, f"{name}[{key}]") for key, item in value.items()}
    raise TypeError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}; pass plain Python values "
        "(.item() of a scalar, .tolist() of an array, str() of a path)"
    )


def number(value: float | str) -> float:
    """Returns a number read from JSON as a float, `"nan"`, `"inf"` and `"-inf"` included."""
    return float(value)


def is_number(value: object) -> bool:
    """Whether a value read from JSON stands for a number that a float can hold."""
    if isinstance(value, str):
        return value in NON_FINITE
    return isinstance(value, float) or is_finite_number(value)


def is_finite_number(value: object) -> bool:
    """Whether a value read from JSON is a number, and finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
