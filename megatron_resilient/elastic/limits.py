"""All limits of time that the parts of a job share, and the order they must have."""

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any, Self

from megatron_resilient.errors import ConfigError


def _limit(default: float, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Limits:
    """Limits in seconds, each a flag of the same name.

    Raises:
        ConfigError: one is no time, or two are in the wrong order.
    """

    heartbeat_interval: float = _limit(1.0, "between two signs of life of a process")
    heartbeat_timeout: float = _limit(6.0, "of silence after which a process is given up")
    fence_timeout: float = _limit(
        30.0, "that a process has to leave a generation that is over, before it is dropped"
    )
    hang_timeout: float = _limit(
        300.0, "without progress anywhere after which hanging processes are dropped (0: never)"
    )
    join_window: float = _limit(
        5.0, "without another arrival after which the nodes that came are taken in"
    )
    rejoin_timeout: float = _limit(
        300.0, "to wait for more nodes when too few are left, before the job saves and ends"
    )
    coordinator_timeout: float = _limit(
        300.0, "that training goes on without the coordinator, before it saves and ends"
    )
    leave_timeout: float = _limit(
        120.0, "that a node which leaves waits for its state to be handed over"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            lowest = "0 or more" if one.name in _MAY_BE_ZERO else "more than 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and "more than" in lowest):
                raise ConfigError(f"{_flag(one.name)} {value:g}: give {lowest} seconds")
        if self.heartbeat_timeout < 3 * self.heartbeat_interval:
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout:g}: must be at least three times "
                f"--heartbeat-interval {self.heartbeat_interval:g}, or one late beat ends a member"
            )
        self._in_order("heartbeat_timeout", "fence_timeout")
        if self.hang_timeout:
            self._in_order("fence_timeout", "hang_timeout")
        self._in_order("heartbeat_timeout", "rejoin_timeout")
        self._in_order("heartbeat_timeout", "coordinator_timeout")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each limit."""
        group = parser.add_argument_group("limits of time, in seconds")
        for one in fields(cls):
            group.add_argument(
                _flag(one.name),
                type=float,
                default=one.default,
                metavar="S",
                help=f"{one.metadata['help']} (default: {one.default:g})",
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Reads the flags that `add_flags` added."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls)})

    def flags(self) -> list[str]:
        """Returns the limits as a command line."""
        return [
            part
            for one in fields(self)
            for part in (_flag(one.name), f"{getattr(self, one.name):g}")
        ]

    def _in_order(self, shorter: str, longer: str) -> None:
        low, high = getattr(self, shorter), getattr(self, longer)
        if high < low:
            raise ConfigError(
                f"{_flag(longer)} {high:g}: must not be less than {_flag(shorter)} {low:g}"
            )


_MAY_BE_ZERO = ("hang_timeout", "join_window")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
