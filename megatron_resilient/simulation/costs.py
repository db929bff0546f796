"""What things cost in a simulation: all of it measured before, none of it computed.

Defaults are what benchmarks of this repository measured, on two cores and with models of some
megabytes; docs/simulation.md names them one by one. They stand for no cluster but that: a
calibration file puts others in their place.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_resilient.errors import ConfigError
from megatron_resilient.input_files import LEAST_ABOVE_0, MOST, read_json

GIB = float(1 << 30)
_NUMBER_OF_NODES = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class SaveCost:
    """What one save takes, of a rank's share of it: fixed, and for each GiB of that share.

    Attributes:
        stall_seconds: training waits.
        stall_seconds_per_gib: the same, for each GiB.
        persist_seconds: from the end of the wait until it is durable.
        persist_seconds_per_gib: the same, for each GiB.
    """

    stall_seconds: float = 0.0
    stall_seconds_per_gib: float = 0.0
    persist_seconds: float = 0.0
    persist_seconds_per_gib: float = 0.0

    def stall(self, rank_bytes: float) -> float:
        """Returns the seconds that training waits for a save of so many bytes a rank."""
        return self.stall_seconds + self.stall_seconds_per_gib * rank_bytes / GIB

    def persist(self, rank_bytes: float) -> float:
        """Returns the seconds from then until it is durable."""
        return self.persist_seconds + self.persist_seconds_per_gib * rank_bytes / GIB


@dataclass(frozen=True)
class Costs:
    """All costs that are measured.

    Attributes:
        step_seconds: one step of stock on all nodes, with even loads and without overlap.
        expert_share: part of that step which MoE layers take (experts and their communication).
        overlap_speedup: how much less MoE layers take with overlap, on top of that.
        resilience_overhead: by which part of a step our runs are longer while nothing fails.
        restart_seconds: from a failure to the first step of a new start, without reading state.
        restart_seconds_per_node: the same, for each node that starts; 0 where nodes start side by
            side and wait for nobody.
        in_process_seconds: the same, if processes stay and take their state from a checkpoint.
        recovery_seconds: the same, with state from memory, without copying it.
        join_seconds: how long the others wait when nodes join, or leave as planned, without copying
            state.
        join_window_seconds: after the last arrival, for more to come.
        load_seconds_per_gib: reading a checkpoint, for each GiB of a rank's share.
        refill_seconds_per_gib: copying state between nodes, for each GiB that one rank sends or
            gets.
        stock_save: a save of Megatron's, asynchronous.
        our_save: a save by expert.
        relative_steps: measured: {nodes: time of a step with even loads, over that on all nodes};
            between two sizes a straight line. Else by the batch (`Workload.relative_step`).
        source: where they are from, for people.
    """

    step_seconds: float = 0.253
    expert_share: float = 0.5
    overlap_speedup: float = 1.127
    resilience_overhead: float = 0.009
    restart_seconds: float = 10.41
    restart_seconds_per_node: float = 0.0
    in_process_seconds: float = 1.49
    recovery_seconds: float = 1.49
    join_seconds: float = 1.49
    join_window_seconds: float = 2.0
    load_seconds_per_gib: float = 48.0
    refill_seconds_per_gib: float = 0.41
    stock_save: SaveCost = field(
        default_factory=lambda: SaveCost(stall_seconds_per_gib=7.3, persist_seconds_per_gib=24.7)
    )
    our_save: SaveCost = field(
        default_factory=lambda: SaveCost(
            stall_seconds=0.019,
            stall_seconds_per_gib=0.33,
            persist_seconds=0.87,
            persist_seconds_per_gib=37.0,
        )
    )
    relative_steps: Mapping[str, float] = field(default_factory=dict)
    source: str = "benchmarks of this repository: two cores, models of some megabytes"

    def __post_init__(self) -> None:
        for name, value in _numbers(self):
            if not 0 <= value <= MOST:
                raise ConfigError(f"{name} is {value}: it must be a number from 0 to {MOST:g}")
        least = min(self.step_seconds, self.overlap_speedup)
        if least < LEAST_ABOVE_0 or self.expert_share > 1:
            raise ConfigError(
                "step_seconds and overlap_speedup must be above 0, expert_share at most 1"
            )
        for nodes, relative in self.relative_steps.items():
            if not (_NUMBER_OF_NODES.fullmatch(nodes) and relative >= LEAST_ABOVE_0):
                raise ConfigError(
                    f"relative_steps has {nodes!r}: {relative}: expected a number of nodes, and a "
                    "number above 0"
                )

    def relative_step(self, nodes: int, by_batch: Callable[[int], float]) -> float:
        """Returns how long a step takes on so many nodes.

        Between measured sizes a straight line; outside them, or without any, the batch decides: a
        run that never lost a node does not say that fewer nodes are as fast.

        Args:
            nodes: in use.
            by_batch: the same for any number of nodes, if only the batch matters.
        """
        if not self.relative_steps:
            return by_batch(nodes)
        known = sorted((int(size), value) for size, value in self.relative_steps.items())
        sizes, values = [size for size, _ in known], [value for _, value in known]
        nearest = min(max(nodes, sizes[0]), sizes[-1])
        measured = float(np.interp(nearest, sizes, values))
        return measured * by_batch(nodes) / by_batch(nearest)

    def to_plain(self) -> dict[str, Any]:
        """Returns them as a calibration file has them."""
        return asdict(self)


def read_costs(path: str | Path) -> Costs:
    """Reads a calibration file: a JSON object with any of the fields of `Costs`.

    What it leaves out keeps its default.

    Raises:
        ConfigError: it is something else; the message says where.
    """
    values = _known(read_json(path, ConfigError), Costs, str(path))
    for name in ("stock_save", "our_save"):
        if name in values:
            values[name] = SaveCost(**_known(values[name], SaveCost, f"{path}: {name}"))
    try:
        return replace(Costs(source=str(path)), **values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_costs(costs: Costs, path: str | Path) -> None:
    """Writes the file that `read_costs` reads."""
    Path(path).write_text(json.dumps(costs.to_plain(), indent=1) + "\n", encoding="utf-8")


def _known(document: Any, kind: type[Costs] | type[SaveCost], where: str) -> dict[str, Any]:
    """Returns the fields of a dataclass that a document has, checked for names and types."""
    names = [each.name for each in fields(kind)]
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: expected an object with any of {', '.join(names)}")
    for name, value in document.items():
        if name not in names:
            raise ConfigError(f"{where}: {name!r} is not one of {', '.join(names)}")
        if name == "relative_steps":
            if not (isinstance(value, Mapping) and all(map(_is_number, value.values()))):
                raise ConfigError(f"{where}: {name} must be an object of numbers by nodes")
        elif name == "source":
            if not isinstance(value, str):
                raise ConfigError(f"{where}: {name} is {json.dumps(value)}: it must be a text")
        elif name not in ("stock_save", "our_save") and not _is_number(value):
            raise ConfigError(f"{where}: {name} is {json.dumps(value)}: it must be a number")
    return dict(document)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(costs: Costs) -> list[tuple[str, float]]:
    found = []
    for name, value in asdict(costs).items():
        if isinstance(value, dict):
            found += [(f"{name}.{part}", number) for part, number in value.items()]
        elif not isinstance(value, str):
            found.append((name, value))
    return found
