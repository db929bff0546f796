"""Who was a member, and when."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resilient.telemetry import Event


@dataclass(frozen=True)
class Stay:
    """One stay of a node.

    Attributes:
        member: The node.
        start: When it joined, in seconds since 1970.
        end: When it left; for one that stays, the last event of the run.
        how: `stays`, `planned` or `failed`.
    """

    member: str
    start: float
    end: float
    how: str


@dataclass(frozen=True)
class Membership:
    """The members of a run over time.

    Attributes:
        unit: What is counted: `nodes`, or `ranks` where no node joined by name.
        counts: (seconds since 1970, how many from then on), ascending.
        stays: One entry a stay, by first arrival of the node; empty when ranks are counted.
    """

    unit: str
    counts: list[tuple[float, int]]
    stays: list[Stay]

    @classmethod
    def of(cls, events: Sequence[Event]) -> "Membership | None":
        """Returns the members; None if nothing tells of them but the size at the start."""
        joined: dict[str, float] = {}
        stays: list[Stay] = []
        counts: list[tuple[float, int]] = []
        ranks: list[tuple[float, int]] = []

        def leave(member: str, time: float, how: str) -> None:
            if member in joined:
                stays.append(Stay(member, joined.pop(member), time, how))

        for event in events:
            kind, time = event["event"], event["time"]
            if kind in ("run_start", "recovery") and "world_size" in event:
                ranks.append((time, event["world_size"]))
            if kind == "member_join":
                joined.setdefault(event["member"], time)
            elif kind == "member_leave":
                leave(event["member"], time, "planned" if event.get("planned") else "failed")
            elif kind == "failure":
                for member in event.get("failed_nodes", []):
                    leave(member, time, "failed")
            else:
                continue
            counts.append((time, event.get("members", len(joined))))
        end = max((event["time"] for event in events), default=0.0)
        stays += [Stay(member, start, end, "stays") for member, start in joined.items()]
        if stays:
            arrival: dict[str, float] = {}
            for stay in stays:
                arrival[stay.member] = min(stay.start, arrival.get(stay.member, stay.start))
            stays.sort(key=lambda stay: (arrival[stay.member], stay.member, stay.start))
            return cls("nodes", _in_order(counts), stays)
        changed = any(event["event"] in ("failure", "recovery") for event in events)
        if ranks and (changed or len({size for _, size in ranks}) > 1):
            return cls("ranks", _in_order(ranks), [])
        return None


def _in_order(counts: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return sorted(counts, key=lambda entry: entry[0])
