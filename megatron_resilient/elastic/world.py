"""Who is a member in one generation, as the coordinator announced it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seat:
    """One rank of a generation.

    Attributes:
        node: id of the process's node.
        local_rank: the process's number on its node.
        state: what the process said of itself when it was ready for this generation.
    """

    node: str
    local_rank: int
    state: dict[str, Any]


@dataclass(frozen=True)
class World:
    """One generation: who has which rank, and why it was formed.

    Attributes:
        generation: counts memberships, from 1.
        seats: the processes by rank.
        rank: this process's rank.
        store_host: host of the generation's TCPStore.
        store_port: its port.
        cause: `start`, `failure`, `leave`, `join`, ...; for events and the report.
        lost_nodes: members of the generation before that are not in this one.
        joined_nodes: the other way round.
        planned: whether all lost nodes left on purpose.
        times: Unix times in seconds that the coordinator saw: `last_sign` (of a member that fell
            silent, else as the next), `evidence` (first word of a failure), `fence`, `formed`.
        final: this world is there to save, and to end.
        donors: processes that hold state and have no seat: ranks do not fill a block of tensor- and
            pipeline-parallel ones. Before the world begins they give what only they hold; their
            ranks follow those of the seats. Then they stand by.
        newest_step: the newest step that anybody reported in the generation before.
    """

    generation: int
    seats: tuple[Seat, ...]
    rank: int
    store_host: str
    store_port: int
    cause: str
    lost_nodes: tuple[str, ...]
    joined_nodes: tuple[str, ...]
    planned: bool
    times: dict[str, float]
    final: bool = False
    donors: tuple[Seat, ...] = ()
    newest_step: int = 0

    @property
    def everybody(self) -> tuple[Seat, ...]:
        """Seats and donors, by rank."""
        return (*self.seats, *self.donors)


@dataclass(frozen=True)
class HeldWorld:
    """What a member that reconnects says of the generation it is in.

    Attributes:
        generation: its number.
        formed: when it was formed, in seconds since 1970: tells it from one of the same number that
            another coordinator formed.
        seats: the processes by rank.
        step: the newest committed step of the member that says so.
        training: whether the member is in it still; if not, it waits for the next one.
    """

    generation: int
    formed: float
    seats: tuple[Seat, ...]
    step: int
    training: bool
