"""Times operations over sizes on all ranks, so that every rank gets the same numbers."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_resilient.comm.device import device_of

# By operation: (units of work, milliseconds), sizes ascending. Bytes, or floating-point operations.
Samples = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Probe:
    """An operation to time.

    Attributes:
        sizes: what `make` takes, ascending; the same on every rank.
        units: the work of a size.
        make: returns what does the operation once, buffers allocated; collective if the operation
            is, and the same on every rank.
    """

    sizes: Sequence[int]
    units: Callable[[int], float]
    make: Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        repetitions: of each operation and size; medians count.
        largest_ms: an operation that takes longer is the last of its sizes.
        budget_seconds: when this much is spent no other round of repetitions begins.
        seed: of the order of operations within a round.
    """

    repetitions: int = 7
    largest_ms: float = 150.0
    budget_seconds: float = 30.0
    seed: int = 0


def measure(
    probes: Mapping[str, Probe], group: dist.ProcessGroup, effort: Effort | None = None
) -> Samples:
    """Times all probes. Collective over `group`, of which the groups of the probes are parts.

    First each operation once per size, upwards, until one takes too long; then rounds of all of
    them in a drawn order, so that a disturbance does not hit the repetitions of one size alone.
    Before each one the ranks wait for each other. Of each repetition the slowest rank counts.

    Args:
        probes: by operation, in the same order on every rank.
        group: all ranks.
        effort: how much.

    Returns:
        The medians, the same on every rank: they are agreed on by one all-reduce at the end.
    """
    effort = effort or Effort()
    device = device_of(group)
    start = time.perf_counter()
    runs: list[tuple[str, float, Callable[[], object]]] = []
    for name, probe in probes.items():
        for size in probe.sizes:
            run = probe.make(size)
            run()  # connections, allocations
            runs.append((name, probe.units(size), run))
            if _largest([_timed(run, group, device)], group)[0] > effort.largest_ms:
                break
    draw = random.Random(effort.seed)
    rounds: list[list[float]] = []
    while len(rounds) < effort.repetitions:
        order = list(range(len(runs)))
        draw.shuffle(order)
        took = [0.0] * len(runs)
        for index in order:
            took[index] = _timed(runs[index][2], group, device)
        rounds.append(took)
        spent = time.perf_counter() - start
        if _largest([spent + spent / (len(rounds) + 1)], group)[0] > effort.budget_seconds:
            break
    agreed = _largest([ms for took in rounds for ms in took], group)
    samples: Samples = {name: [] for name in probes}
    for index, (name, units, _) in enumerate(runs):
        samples[name].append((units, statistics.median(agreed[index :: len(runs)])))
    return samples


def _timed(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the milliseconds of one operation on this rank."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def _largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    together = torch.tensor(list(values), dtype=torch.float64, device=device_of(group))
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return together.tolist()
