"""Step times of the systems that the FSMoE paper compares (arXiv 2501.10714, section 6.1).

A model is a row of equal layers. Each system is what the paper says of it: which communication it
has beside which computation, how it chooses degrees, and where it sends gradients. Linear costs;
streams do not disturb each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.algorithms.gradient_partition import (
    Partition,
    Window,
    partition_gradients,
    partition_of,
)
from megatron_resilient.algorithms.layer_schedule import schedule_layers
from megatron_resilient.algorithms.overlap_policies import one_stream_times, sequential_times
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import StageCosts, stage_costs
from megatron_resilient.algorithms.stream_model import ORDERS
from megatron_resilient.simulation.overlap import MAX_DEGREE, one_stream_traffic
from tools.reproduce.fsmoe_setup import Layer

LINA_BYTES = 30 << 20

DEEPSPEED, TUTEL, IMPROVED = "DeepSpeed-MoE", "Tutel", "Tutel-Improved"
LINA, NO_IIO, FSMOE = "PipeMoE+Lina", "FSMoE-No-IIO", "FSMoE"
OURS, UNEVEN = "ours", "ours, uneven chunks"
PAPER_SYSTEMS = (DEEPSPEED, TUTEL, IMPROVED, LINA, NO_IIO, FSMOE)
SYSTEMS = (*PAPER_SYSTEMS, OURS, UNEVEN)


@dataclass(frozen=True)
class Step:
    """What a step takes, in milliseconds.

    Attributes:
        passes: forward and backward, without gradients.
        exposed: by how much gradients prolong it.
    """

    passes: float
    exposed: float

    @property
    def total(self) -> float:
        """Both."""
        return self.passes + self.exposed


def step(system: str, layer: Layer, layers: int) -> Step:
    """Returns what a step of a model of equal layers takes."""
    if system in (FSMOE, OURS, UNEVEN):
        return _scheduled(system, layer, layers)
    forward, backward = costs_of(layer)
    dense = layers * layer.dense_ms
    gradient = layer.work.gradient_bytes
    reduce_ms = layers * layer.profile.allreduce.time_ms(gradient)
    if system == DEEPSPEED:  # nothing overlaps
        passes = float(sequential_times([forward, backward]).sum())
        return Step(layers * passes + dense, reduce_ms)
    times = one_stream_times([forward, backward], MAX_DEGREE)
    # PipeMoE has one degree for both passes.
    least = times.min(axis=1).sum() if system == NO_IIO else times.sum(axis=0).min()
    passes = float(least)
    if system == TUTEL:
        return Step(layers * passes + dense, reduce_ms)
    window = one_stream_window(backward)
    if system == IMPROVED:  # beside dense work only
        found = partition_gradients(
            [Window.of_dense(layer.work.dense_backward_ms)] * layers,
            [gradient] * layers,
            layer.profile.allreduce,
        )
    elif system == LINA:
        degree = int(times.sum(axis=0).argmin())
        chosen = Window((window.floor_ms[degree],), (window.base_ms[degree],))
        row, made = backward_row(chosen, layer, layers)
        found = in_buckets(row, made, layer.profile.allreduce, LINA_BYTES)
    else:
        assert system == NO_IIO, system
        row, made = backward_row(window, layer, layers)
        found = partition_gradients(row, made, layer.profile.allreduce)
    return Step(layers * passes + dense, sum(found.exposed_ms))


def costs_of(layer: Layer) -> tuple[StageCosts, StageCosts]:
    """Returns those of the forward and the backward pass of the MoE layer."""
    return (
        stage_costs(layer.profile, layer.work),
        stage_costs(layer.profile, layer.work, backward=True),
    )


def one_stream_window(backward: StageCosts) -> Window:
    """Returns the window of a backward pass with all communication on one stream, by degree."""
    floors = one_stream_times([backward], MAX_DEGREE)[0]
    return Window(tuple(floors.tolist()), tuple(one_stream_traffic([backward])[0].tolist()))


def backward_row(moe: Window, layer: Layer, layers: int) -> tuple[list[Window], list[int]]:
    """Returns the windows of a backward pass, and the bytes made in each."""
    dense = Window.of_dense(layer.work.dense_backward_ms)
    return [moe, dense] * layers, [0, layer.work.gradient_bytes] * layers


def in_buckets(
    windows: Sequence[Window], made: Sequence[int], allreduce: LinearCost, bucket_bytes: int
) -> Partition:
    """Sends gradients in buckets, each of one layer and of at most so many bytes, as Lina does.

    A bucket is sent whole where the link is free for longer than its alpha: it does not look
    whether all of it fits, so that the last one of a window may prolong it.
    """
    waiting: list[int] = []
    slices = []
    for window, more in zip(windows, made, strict=True):
        sent, took = 0, 0.0
        while waiting and took + allreduce.alpha_ms < window.room_ms:
            took += allreduce.time_ms(waiting[0])
            sent += waiting.pop(0)
        slices.append(sent)
        whole, rest = divmod(more, bucket_bytes)
        waiting += [bucket_bytes] * whole + [rest] * (rest > 0)
    return partition_of(windows, slices, made, allreduce)


def _scheduled(system: str, layer: Layer, layers: int) -> Step:
    """By the scheduler of this project; for FSMoE with the paper's order of links only."""
    options = {"orders": ORDERS[:1] if system == FSMOE else ORDERS, "uneven": system == UNEVEN}
    plans = schedule_layers(layer.profile, [layer.work] * layers, MAX_DEGREE, **options)
    forward = sum(own.forward.predicted_ms for own in plans)
    backward = phase_options([plans[0].backward_costs], MAX_DEGREE, **options)[0].best_ms
    exposed = sum(own.exposed_gradient_ms for own in plans)
    return Step(forward + layers * (backward + layer.dense_ms), exposed)
