"""What a rank of `fsmoe_fits.py` does: it runs the profiler of this project."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.comm.measure import Effort
from megatron_resilient.comm.node_groups import NodeGroups
from megatron_resilient.comm.profiler import ExpertShape, load_or_measure


def profile(nodes: Sequence[int], budget_seconds: float, largest_bytes: int) -> dict[str, object]:
    """Measures all operations; collective.

    Args:
        nodes: of each rank.
        budget_seconds: no other round of repetitions begins after it.
        largest_bytes: of a message.

    Returns:
        Samples, lines and qualities by operation, and the seconds of measuring and of fitting.
    """
    torch.set_num_threads(1)
    groups = NodeGroups.make(dist.group.WORLD, nodes)
    begin = time.perf_counter()
    measured = load_or_measure(
        groups,
        ExpertShape(256, 1024),
        fit_linear,
        effort=Effort(repetitions=9, largest_ms=250.0, budget_seconds=budget_seconds),
        largest_bytes=largest_bytes,
    )
    measuring = time.perf_counter() - begin
    begin = time.process_time()
    for points in measured.samples.values():
        fit_linear(*zip(*points, strict=True))
    return {
        "samples": measured.samples,
        "lines": {name: asdict(own) for name, own in measured.lines.items()},
        "quality": {name: asdict(own) for name, own in measured.quality.items()},
        "measuring_seconds": measuring,
        "fitting_seconds": time.process_time() - begin,
    }
