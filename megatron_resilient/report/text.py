"""Numbers, times and foreign text as a reader likes them."""

import math
from datetime import UTC, datetime


def clean(text: str) -> str:
    """Returns `text` with every character that no page can show replaced by the usual sign.

    A string in an event may hold anything: control characters are not HTML, and half a surrogate
    pair is not UTF-8.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def shorten(text: str, length: int) -> str:
    """Returns `text` on one line of at most `length` characters; what is cut is the middle."""
    text = clean(text).replace("\n", " ").replace("\t", " ")
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def significant(value: float, digits: int = 3, *, pad: bool = False) -> str:
    """Returns `value` with `digits` significant digits, without powers of ten up to 1e15.

    Args:
        value: Any number.
        digits: How many count.
        pad: Whether to keep zeros at the end of a fraction, as columns of numbers want.
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value
    decimals = max(0, digits - 1 - exponent)
    text = f"{value:,.{decimals}f}"
    return text if pad or "." not in text else text.rstrip("0").rstrip(".")


def compact(value: float) -> str:
    """Returns `value` with three digits and a thousands unit: 1234567 -> 1.23 M."""
    if not math.isfinite(value):
        return str(value)
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What rounds up to the next unit is written in it: 999,999 is 1 M.
        if abs(value) >= unit * 0.9995:
            return f"{significant(value / unit)} {name}"
    return significant(value)


def in_bytes(value: float) -> str:
    """Returns a number of bytes with its unit: 212e9 -> 212 GB."""
    text = compact(value)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def duration(seconds: float) -> str:
    """Returns a duration in the two largest units that matter: 93784 -> 1 d 2 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return f"{seconds} s"
    if seconds < 0.9995:
        return f"{significant(seconds * 1000, pad=True)} ms"
    if seconds < 59.95:
        return f"{significant(seconds, pad=True)} s"
    for large, small, large_name, small_name in (
        (60, 1, "min", "s"),
        (3600, 60, "h", "min"),
        (86400, 3600, "d", "h"),
    ):
        rounded = round(seconds / small) * small
        if large == 86400 or rounded < large * (60 if large == 60 else 24):
            whole, rest = divmod(rounded, large)
            rest_text = f" {rest // small} {small_name}" if rest else ""
            return f"{whole:,} {large_name}{rest_text}"
    raise AssertionError("the last unit takes all")


def moment(unix_seconds: float) -> str:
    """Returns a point in time, in UTC, to the second."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no such year
        return f"{unix_seconds:g} s"


def times(value: float) -> str:
    """Returns a ratio, followed by the sign for times."""
    return f"{significant(value)}\N{MULTIPLICATION SIGN}"


def percent(share: float) -> str:
    """Returns a share of one in percent."""
    return f"{significant(100 * share)} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns `1 step`, `2 steps`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
