"""Steps as arrays, and long series made short enough to draw."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_resilient.telemetry import Event, number
from megatron_resilient.telemetry.summary import MAIN_LOSS, step_tokens_per_second

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepSeries:
    """What the `step` events say, [N] each, in the order given.

    Attributes:
        step: Step number.
        time: Seconds since 1970.
        seconds: How long the step took.
        loss: Main loss; nan where there is none.
        tokens_per_second: Throughput; nan where the step took no measurable time.
        skipped: Whether the update was left out.
    """

    step: NDArray[np.int64]
    time: Floats
    seconds: Floats
    loss: Floats
    tokens_per_second: Floats
    skipped: NDArray[np.bool_]

    @classmethod
    def of(cls, events: Iterable[Event]) -> "StepSeries":
        """Returns the series of `step` events."""
        events = list(events)
        rates = (step_tokens_per_second(event) for event in events)
        return cls(
            step=np.array([event["step"] for event in events], dtype=np.int64),
            time=np.array([event["time"] for event in events], dtype=float),
            seconds=np.array([event["seconds"] for event in events], dtype=float),
            loss=np.array([main_loss(event) for event in events], dtype=float),
            tokens_per_second=np.array(
                [np.nan if rate is None else rate for rate in rates], dtype=float
            ),
            skipped=np.array([event.get("skipped", False) for event in events], dtype=bool),
        )


def main_loss(event: Event) -> float:
    """Returns the loss that a curve shows; nan if the event names none."""
    losses = event["loss"]
    name = MAIN_LOSS if MAIN_LOSS in losses else next(iter(losses), None)
    return np.nan if name is None else number(losses[name])


@dataclass(frozen=True)
class Line:
    """A curve to draw, with the range that each of its points stands for, [M] each.

    Attributes:
        x: Where.
        mean: Mean of the values there.
        low: Least of them.
        high: Greatest of them.
        exact: Whether each point is one value.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    exact: bool


def thin_out(x: Floats, y: Floats, points: int) -> Line:
    """Returns a curve of at most `points` points through (x, y); non-finite y are left out.

    Longer series are cut into `points` intervals of equal width. O(N log N).
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if x.size <= points:
        return Line(x, y, y, y, exact=True)
    bins = np.minimum((x - x[0]) / max(x[-1] - x[0], np.finfo(float).tiny) * points, points - 1)
    starts = np.flatnonzero(np.diff(bins.astype(np.int64), prepend=-1))
    sizes = np.diff(starts, append=x.size)
    return Line(
        x=np.add.reduceat(x, starts) / sizes,
        mean=np.add.reduceat(y, starts) / sizes,
        low=np.minimum.reduceat(y, starts),
        high=np.maximum.reduceat(y, starts),
        exact=False,
    )
