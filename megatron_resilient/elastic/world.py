"""Who is a member in one generation, as the coordinator announced it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


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
        times: Unix times in seconds that the coordinator saw: `evidence` (first word of a failure),
            `fence`, `formed`.
        final: this world is there to save, and to end.
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

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Reads the coordinator's `world` order; what it says beyond the fields is ignored."""
        return cls(
            generation=int(message["generation"]),
            seats=tuple(
                Seat(seat["node"], int(seat["local_rank"]), dict(seat["state"]))
                for seat in message["seats"]
            ),
            rank=int(message["rank"]),
            store_host=message["store_host"],
            store_port=int(message["store_port"]),
            cause=message["cause"],
            lost_nodes=tuple(message["lost_nodes"]),
            joined_nodes=tuple(message["joined_nodes"]),
            planned=bool(message["planned"]),
            times=dict(message["times"]),
            final=bool(message.get("final", False)),
        )

    def seats_message(self) -> list[dict[str, Any]]:
        """Returns the seats as they stand in a message."""
        return [
            {"node": seat.node, "local_rank": seat.local_rank, "state": seat.state}
            for seat in self.seats
        ]
