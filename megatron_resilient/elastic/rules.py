"""By which numbers the coordinator decides."""

from dataclasses import dataclass, field

from megatron_resilient.elastic.limits import Limits


@dataclass(frozen=True)
class Rules:
    """What the coordinator was told at its start.

    Attributes:
        limits: Limits of time.
        min_nodes: Fewer nodes do not train. The workers' own minimum counts if it is higher.
        max_nodes: With so many the start waits for no more; None: the workers may say.
        grace: Seconds that a worker without an agent has to come back when its connection broke.
        leave_window: Seconds without another departure after which those that leave are let go.
        straggler_window: Seconds over which the busy share is averaged.
        straggler_ratio: A node is slow if its share is over so many times the median.
        straggler_windows: For so many windows in a row.
    """

    limits: Limits = field(default_factory=Limits)
    min_nodes: int = 1
    max_nodes: int | None = None
    grace: float = 0.5
    leave_window: float = 0.3
    straggler_window: float = 10.0
    straggler_ratio: float = 2.0
    straggler_windows: int = 3
