"""Which passes of which layers were scheduled, and the one that a report draws."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_resilient.telemetry import Event


@dataclass(frozen=True)
class Schedules:
    """The newest schedule of each pass.

    Attributes:
        passes: (layer, phase) -> its event, by layer; forward first.
    """

    passes: dict[tuple[int, str], Event]

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Schedules | None":
        """Returns what `events` say; None without a schedule that has operations.

        A measured pass replaces the plan that it followed, and a later plan both.
        """
        found = {
            (event["layer"], event["phase"]): event
            for event in events
            if event["event"] == "schedule" and any(event["planned"].values())
        }
        order = {"forward": 0, "backward": 1}
        keys = sorted(found, key=lambda key: (key[0], order.get(key[1], 2), key[1]))
        return cls({key: found[key] for key in keys}) if found else None

    @property
    def layers(self) -> list[int]:
        """Layers with a schedule."""
        return list(dict.fromkeys(layer for layer, _ in self.passes))

    @property
    def drawn(self) -> dict[str, Event]:
        """The passes of one layer by phase: of those that were measured, if any, the slowest."""
        measured = [key for key, event in self.passes.items() if event.get("measured")]
        keys = measured or list(self.passes)
        layer, _ = max(keys, key=lambda key: self.passes[key]["planned_seconds"])
        return {phase: event for (own, phase), event in self.passes.items() if own == layer}
