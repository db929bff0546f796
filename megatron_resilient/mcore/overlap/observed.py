"""What the layers really did in the steps that are looked at: work, times, gaps between layers."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.algorithms.lanes import Record
from megatron_resilient.algorithms.stage_costs import BACKWARD_GEMMS, LayerWork
from megatron_resilient.comm.device import device_of
from megatron_resilient.comm.pipeline import Span
from megatron_resilient.mcore.overlap.plan import PassReport

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

# The operation of a profile that each operation of a pass is.
COST_OF = {
    "dispatch": "a2a",
    "combine": "a2a",
    "allgather": "allgather",
    "reducescatter": "reducescatter",
    "expert": "gemm",
    "gradient": "allreduce",
}
_STAGES = ("dispatch", "combine", "allgather", "reducescatter", "expert")
# Of a layer, in the table that ranks agree on: work of its stages, milliseconds of both passes,
# and of what follows the backward pass.
_COLUMNS = len(_STAGES) + 3


@dataclass(frozen=True)
class Pass:
    """One pass of one layer in one microbatch.

    Attributes:
        layer: its number.
        name: "forward" or "backward".
        spans: when each operation ran, in seconds since the pass began.
        units: of work of each operation.
        clock_seconds: when the pass was over, on a clock of this rank.
    """

    layer: int
    name: str
    spans: list[Span]
    units: Mapping[tuple[str, int], float]
    clock_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(span.end_seconds for span in self.spans)


class Observation:
    """Watches the passes of layers while it is on; off, it costs nothing.

    Args:
        layers: of this rank, with overlap.
    """

    def __init__(self, layers: "Sequence[MoELayer]") -> None:
        self._layers = layers
        self._told: list[tuple[int, str, PassReport, _Moment]] = []
        self._is_cuda = next(layers[0].parameters()).is_cuda

    def start(self) -> None:
        """Watches from now on; what was seen before is forgotten."""
        self._told = []
        for layer in self._layers:
            layer.overlap.on_outcome = partial(self._take, layer.layer_number)

    def stop(self) -> list[Pass]:
        """Stops watching; returns what was seen, in order. On CUDA it waits for the device."""
        for layer in self._layers:
            layer.overlap.on_outcome = None
        told, self._told = self._told, []
        if not told:
            return []
        first = told[0][3]
        return [
            Pass(layer, name, report.spans(), report.units, moment.seconds_since(first))
            for layer, name, report, moment in told
        ]

    def _take(self, layer: int, name: str, report: PassReport) -> None:
        self._told.append((layer, name, report, _Moment(self._is_cuda)))


class _Moment:
    """A moment of this rank: of the device, where what is timed runs on one."""

    def __init__(self, is_cuda: bool) -> None:
        self._clock = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if is_cuda else None
        if self._event is not None:
            self._event.record()

    def seconds_since(self, first: "_Moment") -> float:
        if self._event is None or first._event is None:
            return self._clock - first._clock
        self._event.synchronize()
        return first._event.elapsed_time(self._event) / 1000


@dataclass(frozen=True)
class LayerTimes:
    """What a layer took, of the rank that took longest.

    Attributes:
        work: of one microbatch, of the rank that has most.
        pass_seconds: {"forward": .., "backward": ..}, mean over microbatches.
    """

    work: LayerWork
    pass_seconds: Mapping[str, float]


def agree(
    passes: Sequence[Pass], gradient_bytes: Mapping[int, int], group: dist.ProcessGroup
) -> list[LayerTimes] | None:
    """Returns what the layers have to do, the same on all ranks. One small all-reduce.

    Args:
        passes: of this rank; may be none.
        gradient_bytes: dense gradients that each layer's backward pass makes final, by layer.
        group: ranks with the same layers. Collective.

    Returns:
        By layer, ascending; None if no rank has seen anything.
    """
    layers = sorted(gradient_bytes)
    table = torch.zeros(len(layers), _COLUMNS, dtype=torch.float64)
    for row, layer in enumerate(layers):
        table[row] = torch.tensor(_row([own for own in passes if own.layer == layer]))
    for layer, gap in _gaps(passes).items():
        table[layers.index(layer), -1] = gap
    table = table.to(device_of(group))
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    if not table.any():
        return None
    found = []
    for layer, row in zip(layers, table.tolist(), strict=True):
        sent, returned, gathered, scattered, flops, forward_ms, backward_ms, gap_ms = row
        work = LayerWork(
            max(sent, returned), gathered, scattered, flops, gradient_bytes[layer], gap_ms
        )
        found.append(
            LayerTimes(work, {"forward": forward_ms / 1000, "backward": backward_ms / 1000})
        )
    return found


def observations(passes: Sequence[Pass]) -> Iterator[tuple[str, float, float]]:
    """Gives (operation of a profile, units, seconds) of all that ran.

    An expert's backward pass is as much as two forward passes of half of it: so the planner reckons
    it, alpha included.
    """
    for own in passes:
        for span in own.spans:
            units, seconds = own.units[span.key], span.end_seconds - span.start_seconds
            halves = BACKWARD_GEMMS if span.key[0] == "expert" and own.name == "backward" else 1
            yield COST_OF[span.key[0]], units / halves, seconds / halves


def scaled(cost: LinearCost, ratio: float) -> LinearCost:
    """Returns the cost of what takes `ratio` times as long."""
    return LinearCost(cost.alpha_ms * ratio, cost.beta * ratio)


def records(one: Pass) -> dict[str, list[Record]]:
    """Returns the lanes of a pass as the event `schedule` has them."""
    lanes: dict[str, list[Record]] = defaultdict(list)
    for span in sorted(one.spans, key=lambda span: span.start_seconds):
        lanes[span.lane].append([*span.key, span.start_seconds, span.end_seconds])
    return dict(lanes)


def _row(passes: Sequence[Pass]) -> list[float]:
    """Returns a layer's row of the table but for the gap: means over microbatches."""
    forward = [own for own in passes if own.name == "forward"]
    backward = [own for own in passes if own.name == "backward"]
    work = [
        _mean(
            [sum(units for key, units in own.units.items() if key[0] == stage) for own in forward]
        )
        for stage in _STAGES
    ]
    times = [1000 * _mean([own.seconds for own in each]) for each in (forward, backward)]
    return [*work, *times, 0.0]


def _gaps(passes: Sequence[Pass]) -> dict[int, float]:
    """Returns the milliseconds from each layer's backward pass to that of the layer below.

    The lowest layer has none below: it gets the mean of the others.
    """
    backward = [own for own in passes if own.name == "backward"]
    found: dict[int, list[float]] = {own.layer: [] for own in backward}
    for own, below in itertools.pairwise(backward):
        if below.layer < own.layer:  # else another microbatch
            begun = below.clock_seconds - below.seconds
            found[own.layer].append(1000 * max(0.0, begun - own.clock_seconds))
    known = [gap for gaps in found.values() for gap in gaps]
    return {layer: _mean(gaps or known) for layer, gaps in found.items()}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
