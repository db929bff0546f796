"""Where the experts of each layer were in the end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron_resilient.telemetry import Event


@dataclass(frozen=True)
class LayerPlacement:
    """The slots of one layer.

    Attributes:
        slots: For each rank, the experts in its slots.
    """

    slots: list[list[int]]

    @cached_property
    def replicas(self) -> Counter[int]:
        """How many slots each expert has."""
        return Counter(expert for own in self.slots for expert in own)

    def most_replicated(self, count: int) -> list[tuple[int, int]]:
        """Returns (expert, replicas) of the experts with most, ties by expert."""
        return sorted(self.replicas.items(), key=lambda item: (-item[1], item[0]))[:count]


def last_placement(events: Iterable[Event]) -> dict[int, LayerPlacement]:
    """Returns the last placement of each layer, by layer."""
    found = {
        event["layer"]: LayerPlacement(event["slots"])
        for event in events
        if event["event"] == "placement" and any(event["slots"])
    }
    return dict(sorted(found.items()))
