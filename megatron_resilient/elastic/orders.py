"""What the membership decides, for the coordinator to carry out."""

from dataclasses import dataclass, field
from typing import Any

from megatron_resilient.elastic.messages import FromServer


@dataclass(frozen=True)
class Send:
    """Send a message on a connection."""

    key: int
    message: FromServer


@dataclass(frozen=True)
class Close:
    """Close a connection once what was sent on it is out."""

    key: int


@dataclass(frozen=True)
class OpenStore:
    """Start a store for a generation, and report back."""

    generation: int


@dataclass(frozen=True)
class CloseStore:
    """End the store of a generation."""

    generation: int


@dataclass(frozen=True)
class Record:
    """Write an event of `telemetry` into the run's directory."""

    event: str
    generation: int
    step: int | None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """Tell people."""

    text: str


@dataclass(frozen=True)
class End:
    """The job is over; the coordinator ends with that exit code."""

    code: int


Order = Send | Close | OpenStore | CloseStore | Record | Log | End
