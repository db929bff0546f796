"""What communication and computation cost: `alpha + beta * n`, for five operations of a cluster."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_resilient.errors import ProfileError

# The operations of a profile, in the order of its file, and what one unit of their work is.
OPERATIONS = {
    "a2a": "byte",
    "allgather": "byte",
    "reducescatter": "byte",
    "allreduce": "byte",
    "gemm": "flop",
}

# What a fit may be wrong by before plans made from it are not to be relied on. An overlap of three
# streams gains 10 to 50 %: a stage that is mistaken by more than this can turn its sign.
MAX_RELATIVE_ERROR = 0.15
MIN_R2 = 0.98


@dataclass(frozen=True)
class LinearCost:
    """The time of an operation on n units (bytes or floating-point operations).

    FSMoE (arXiv 2501.10714), section 4.1.

    Attributes:
        alpha_ms: Milliseconds that it takes however small it is.
        beta: Milliseconds per unit.

    Raises:
        ProfileError: A value that is negative or not finite.
    """

    alpha_ms: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in (("alpha_ms", self.alpha_ms), ("beta", self.beta)):
            if not math.isfinite(value) or value < 0:
                raise ProfileError(f"{name} is {value}: it must be a finite number >= 0")

    def time_ms(self, units: float) -> float:
        """Returns the milliseconds of one operation; none for no units, as nothing is called."""
        return self.alpha_ms + units * self.beta if units > 0 else 0.0

    def units_within(self, time_ms: float) -> float:
        """Returns how many units fit into `time_ms`; none where not even alpha does.

        The guarded inverse of FSMoE, section 5.1. Infinite where units cost nothing.
        """
        if time_ms <= self.alpha_ms:
            return 0.0
        return (time_ms - self.alpha_ms) / self.beta if self.beta else math.inf


@dataclass(frozen=True)
class FitQuality:
    """How well a line describes what was measured.

    Attributes:
        r2: Share of the variance that the line explains. Large operations decide it alone: beside
            an R2 of 0.999 the small ones may be mistaken by half.
        max_relative_error: Largest `|predicted / measured - 1|` over the sizes.
        worst_units: The size where that is.
        smallest_units: Smallest size measured; below it the line is a guess.
    """

    r2: float
    max_relative_error: float | None = None
    worst_units: float | None = None
    smallest_units: float | None = None

    def distrust(self) -> str | None:
        """Returns why plans should not rely on this fit, or None where they may."""
        if self.max_relative_error is not None and self.max_relative_error > MAX_RELATIVE_ERROR:
            where = "" if self.worst_units is None else f" at {self.worst_units:.4g} units"
            return (
                f"the line misses a measured time by {self.max_relative_error:.0%}{where} "
                f"(more than {MAX_RELATIVE_ERROR:.0%}): measure again on an idle machine, or only "
                "sizes near those of the chunks"
            )
        if self.r2 < MIN_R2:
            return (
                f"the line explains {self.r2:.3f} of the variance (less than {MIN_R2}): "
                "measure again on an idle machine, or larger sizes"
            )
        return None


@dataclass(frozen=True)
class Profile:
    """The costs of one cluster and one layout of ranks.

    Attributes:
        a2a: All-to-all between nodes, per byte that a rank sends.
        allgather: Inside a node, per byte.
        reducescatter: Inside a node, per byte.
        allreduce: Of gradients between nodes, per byte.
        gemm: Expert computation, per floating-point operation.
        quality: How well each line fits, by the operation's name, where it was measured.
    """

    a2a: LinearCost
    allgather: LinearCost
    reducescatter: LinearCost
    allreduce: LinearCost
    gemm: LinearCost
    quality: Mapping[str, FitQuality] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Mapping[str, LinearCost], quality: Mapping[str, FitQuality]) -> "Profile":
        """Returns a profile of measured lines; what has none costs nothing."""
        none = LinearCost(0.0, 0.0)
        costs = {operation: lines.get(operation, none) for operation in OPERATIONS}
        return cls(**costs, quality=dict(quality))

    @property
    def operations(self) -> list[str]:
        """Those of `OPERATIONS` that cost something, in order."""
        return [operation for operation in OPERATIONS if self.cost(operation).time_ms(1.0) > 0]

    def cost(self, operation: str) -> LinearCost:
        """Returns the cost of one of `OPERATIONS`."""
        assert operation in OPERATIONS, operation
        cost: LinearCost = getattr(self, operation)
        return cost

    def distrust(self) -> list[str]:
        """Returns one text for each fit that plans should not rely on: "a2a: the line ..."."""
        reasons = ((name, own.distrust()) for name, own in self.quality.items())
        return [f"{name}: {reason}" for name, reason in reasons if reason]
