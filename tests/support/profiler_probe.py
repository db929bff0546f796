"""Profiles of the ranks of a test."""

import time
from pathlib import Path

import torch.distributed as dist

from megatron_resilient.comm import profiler
from megatron_resilient.comm.drift import DriftMonitor
from megatron_resilient.comm.measure import Effort, Probe, measure
from megatron_resilient.comm.node_groups import NodeGroups
from megatron_resilient.comm.profiler import ExpertShape, load_or_measure


class Line:
    def __init__(self, alpha_ms, beta):
        self.alpha_ms, self.beta = alpha_ms, beta


def fit(units, times):
    """A line through the first and the last point."""
    beta = (times[-1] - times[0]) / (units[-1] - units[0])
    return Line(times[0] - beta * units[0], beta), len(units)


def profile(nodes, kept):
    """Measures, then reuses; then measures again what cannot be read."""
    groups = NodeGroups.make(dist.group.WORLD, nodes)
    shape = ExpertShape(hidden=16, ffn=32)
    options = {"effort": Effort(repetitions=2), "largest_bytes": 1 << 18, "folder": Path(kept)}
    first = load_or_measure(groups, shape, fit, **options)
    second = load_or_measure(groups, shape, fit, **options)
    dist.barrier()
    path = next(Path(kept).glob("profile-*.json"))
    text = path.read_text(encoding="utf-8")
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_text(text[: len(text) // 2], encoding="utf-8")
    third = load_or_measure(groups, shape, fit, **options)
    other = load_or_measure(groups, ExpertShape(16, 64), fit, **options)
    fresh = load_or_measure(groups, shape, fit, fresh=True, **options)
    dist.barrier()  # rank 0 writes last
    return {
        "samples": first.samples,
        "same": second.samples == first.samples,
        "reused": [each.reused for each in (first, second, third, other, fresh)],
        "files": len(list(Path(kept).iterdir())),
        "text": text,
        "known": first.predict_ms("gemm", 1e6) == second.predict_ms("gemm", 1e6),
        "unknown": str(first.predict_ms("broadcast", 1)),
        "operations": list(profiler.SLOPES),
    }


def slow_sizes():
    """The largest of what takes too long is left out, by all ranks."""
    made = []

    def make(size):
        made.append(size)
        # The ranks do not find the same sizes slow.
        wait = 0.06 if size >= 3 + 2 * dist.get_rank() else 0.0

        return lambda: time.sleep(wait)

    probe = Probe([1, 2, 3, 4, 5, 6], float, make)
    samples = measure({"op": probe}, dist.group.WORLD, Effort(3, largest_ms=50))
    return {"made": made, "sizes": [units for units, _ in samples["op"]], "samples": samples}


def drift():
    """One rank alone sees a slow link, then both; one is slow at computing."""
    rank = dist.get_rank()
    names = ["a2a", "gemm", "allgather"]

    def look(a2a, gemm, count=20):
        monitor = DriftMonitor(lambda operation, units: units)
        for _ in range(count):
            monitor.observe("a2a", 10.0, a2a * 10.0 / 1000)
            monitor.observe("gemm", 5.0, gemm * 5.0 / 1000)
        return monitor.drifted(names, dist.group.WORLD)

    return {
        "none": look(1.1, 0.9),
        "one waits": look(2.0 if rank else 1.0, 1.0),
        "slow link": look(2.0 + rank, 1.0),
        "fast link": look(0.5, 1.0),
        "one computes slowly": look(1.0, 1.5 if rank else 1.0),
        "too few": look(9.0, 9.0, 3),
    }
