"""Overlap on the streams of one device: planned from measured costs, against what it then takes.

Two nodes do not fit into one device, so links are copies. Dispatch and combine go from and to
pinned host memory (the "link between nodes"), AllGather and ReduceScatter are copies and sums on
the device (the "links inside nodes"), and experts are matrix products. The forward pass of a layer
is planned by `schedule_layers` and run by the same streams as in training, for every degree up to
8: the chosen plan against no overlap, against the best that was measured, and predictions against
measurements.

    .venv/bin/python benchmarks/overlap_device.py [--device cpu]

Takes less than five minutes. Without a GPU it runs small, on threads; those numbers only show that
the program works: threads that copy and threads that multiply take the same cores.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_resilient.algorithms.cost_model import Profile
from megatron_resilient.algorithms.layer_schedule import LayerSchedule, schedule_layers
from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.comm.streams import Streams, streams_for
from megatron_resilient.mcore.overlap.plan import PassPlan

MAX_DEGREE = 8
REPETITIONS = 15
ITEM_BYTES = 2
console = Console(width=120, highlight=False)


class Layer:
    """The stages of one layer on one device.

    Args:
        device: where.
        rows: tokens of a pass.
        hidden: width of a token.
        ffn: width between an expert's products.
    """

    def __init__(self, device: torch.device, rows: int, hidden: int, ffn: int) -> None:
        self.device, self.rows, self.hidden, self.ffn = device, rows, hidden, ffn
        options = {"dtype": torch.bfloat16, "device": device}
        pinned = device.type == "cuda"
        self._host = torch.randn(rows, hidden).to(torch.bfloat16)
        self._back = torch.empty_like(self._host)
        if pinned:
            self._host, self._back = self._host.pin_memory(), self._back.pin_memory()
        self._up = torch.randn(hidden, ffn, **options)
        self._down = torch.randn(ffn, hidden, **options)

    def bytes(self, rows: int) -> float:
        """Returns the bytes of so many tokens."""
        return float(rows * self.hidden * ITEM_BYTES)

    def flops(self, rows: int) -> float:
        """Returns the floating-point operations of so many tokens."""
        return 4.0 * rows * self.hidden * self.ffn

    def dispatch(self, start: int, stop: int) -> torch.Tensor:
        """Brings tokens."""
        return self._host[start:stop].to(self.device, non_blocking=True, copy=True)

    def allgather(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies them, as often as there are ranks on a node of eight."""
        return torch.cat([tokens] * 8)[: len(tokens)]

    def expert(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes them."""
        return (tokens @ self._up) @ self._down

    def reducescatter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds up what eight ranks would have."""
        return torch.stack([tokens] * 8).sum(dim=0)

    def combine(self, start: int, stop: int, tokens: torch.Tensor) -> torch.Tensor:
        """Brings outputs back."""
        return self._back[start:stop].copy_(tokens, non_blocking=True)

    def functions(self, plan: PassPlan) -> dict[str, Callable]:
        """Returns the stages of a plan's chunks."""
        edges = [int(edge * self.rows) for edge in plan.cuts]
        chunks = list(itertools.pairwise(edges))
        return {
            "dispatch": lambda chunk: self.dispatch(*chunks[chunk]),
            "allgather": lambda chunk, tokens: self.allgather(tokens),
            "expert": lambda chunk, tokens: self.expert(tokens),
            "reducescatter": lambda chunk, tokens: self.reducescatter(tokens),
            "combine": lambda chunk, tokens: self.combine(*chunks[chunk], tokens),
        }

    def probes(self, rows: int) -> dict[str, tuple[float, Callable[[], object]]]:
        """Returns work and function of each operation of a profile on so many tokens."""
        tokens = self.dispatch(0, rows)
        size, flops = self.bytes(rows), self.flops(rows)
        return {
            "a2a": (size, lambda: self.dispatch(0, rows)),
            "allgather": (size, lambda: self.allgather(tokens)),
            "reducescatter": (size, lambda: self.reducescatter(tokens)),
            "gemm": (flops, lambda: self.expert(tokens)),
        }


def milliseconds(device: torch.device, run: Callable[[], object], repetitions: int) -> float:
    """Returns the median time of a function, until the device is done with it."""
    times = []
    for _ in range(repetitions + 2):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def profile(layer: Layer) -> Profile:
    """Measures what the operations take."""
    samples: dict[str, list[tuple[float, float]]] = {}
    sizes = np.unique(np.geomspace(layer.rows / 16, layer.rows, 9).astype(int))
    for rows in sizes.tolist():
        for name, (units, run) in layer.probes(rows).items():
            taken = milliseconds(layer.device, run, REPETITIONS)
            samples.setdefault(name, []).append((units, taken))
    fits = {name: fit_linear(*zip(*points, strict=True)) for name, points in samples.items()}
    return Profile.of(
        {name: line for name, (line, _) in fits.items()},
        {name: quality for name, (_, quality) in fits.items()},
    )


def measure(layer: Layer, streams: Streams, plan: PassPlan) -> float:
    """Returns the milliseconds of a pass."""
    schedule, functions = plan.schedule(True, False), layer.functions(plan)
    return milliseconds(layer.device, lambda: streams.run(schedule, functions), REPETITIONS)


def show(layer: Layer, planned: LayerSchedule, streams: Streams) -> None:
    """Measures every degree of one layer, and prints it beside what was predicted."""
    forward = planned.forward
    chosen = PassPlan.planned(forward, planned.lanes())
    taken = {
        degree: measure(layer, streams, PassPlan(degree, order=forward.order))
        for degree in range(1, MAX_DEGREE + 1)
    }
    own = measure(layer, streams, chosen)
    table = Table("degree", "predicted ms", "measured ms", "error")
    for degree, ms in taken.items():
        predicted = forward.by_degree_ms[degree - 1]
        table.add_row(str(degree), f"{predicted:.2f}", f"{ms:.2f}", f"{predicted / ms - 1:+.0%}")
    console.print(table)
    console.print(
        f"chosen: {forward.degree} chunks, {forward.order}: {own:.2f} ms; "
        f"{taken[1] / own:.2f}x no overlap, {own / min(own, *taken.values()):.2f} of the best\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Profiles, plans, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="default: %(default)s")
    device = torch.device(parser.parse_args(arguments).device)
    on_gpu = device.type == "cuda"
    rows, hidden = (32768, 4096) if on_gpu else (1024, 256)
    what = torch.cuda.get_device_name(device) if on_gpu else "CPU: says nothing about overlap"
    streams = streams_for(device)
    for ffn in (hidden // 2, 2 * hidden, 8 * hidden):
        layer = Layer(device, rows, hidden, ffn)
        costs = profile(layer)
        size = layer.bytes(rows)
        work = LayerWork(size, size, size, layer.flops(rows))
        (planned,) = schedule_layers(costs, [work], MAX_DEGREE)
        console.print(f"{what}; {rows:,} tokens, hidden {hidden}, expert {ffn}")
        for text in costs.distrust():
            console.print(text)
        show(layer, planned, streams)


if __name__ == "__main__":
    main()
