"""One rank of benchmarks/overlap.py, on the emulated testbed: profiles, then runs what competes.

    overlap_ranks.py RESULT CASES REPETITIONS

CASES are numbers of cases in JSON, [] for all. Rank 0 writes what was measured to RESULT, as JSON.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.overlap_cases import (
    CASES,
    COMPUTE_ALPHA_MS,
    FLOPS_PER_MS,
    MIB,
    NO_OVERLAP,
    REAL,
    Case,
    Contender,
    contenders,
)
from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.comm import exchange
from megatron_resilient.comm.measure import Effort, Probe, measure
from megatron_resilient.comm.node_groups import NodeGroups, read_node_map
from megatron_resilient.comm.profiler import ExpertShape, expert_probes, load_or_measure
from megatron_resilient.comm.streams import ThreadStreams

# The padded experts compute for this share of their time and sleep for the rest.
REAL_SHARE = 0.2
HIDDEN = 256
# So many of each kind that ran fastest at first are measured as often as asked.
FASTEST = {"sweep": 4, "one stream": 3, NO_OVERLAP: 1}
# A run begins so long after it was agreed on.
LEAD_SECONDS = 0.03


def pad(milliseconds: float) -> None:
    """Takes so long, and computes meanwhile, but not all the time."""
    start = time.perf_counter()
    end, busy = start + milliseconds / 1000, start + REAL_SHARE * milliseconds / 1000
    while time.perf_counter() < busy:
        torch.mm(_BLOCK, _BLOCK)
    time.sleep(max(0.0, end - time.perf_counter()))


_BLOCK = torch.ones(96, 96)


def padded_ms(flops: float) -> float:
    """Returns how long the padded experts take, forward."""
    return COMPUTE_ALPHA_MS + flops / FLOPS_PER_MS


def padded(flops: float) -> Callable[[], object]:
    """Returns experts that mostly sleep."""
    return lambda: pad(padded_ms(flops))


Experts = Callable[[float], Callable[[], object]]


class Layer:
    """The operations of one pass over one chunk, on real groups with real bytes.

    Args:
        groups: who sends to whom.
        work: of the layer.
        experts: makes what computes so many floating-point operations.
        backward: computes twice.
        degree: chunks.
    """

    def __init__(
        self,
        groups: NodeGroups,
        work: LayerWork,
        experts: Experts,
        backward: bool,
        degree: int,
    ) -> None:
        self.groups, self.times = groups, 1 + backward
        nodes, ranks = dist.get_world_size(groups.inter), dist.get_world_size(groups.intra)
        here = dist.get_rank(groups.inter)
        row_bytes = HIDDEN * 4
        part = round(work.a2a_bytes / degree / row_bytes / (nodes - 1))
        self.splits = [0 if peer == here else part for peer in range(nodes)]
        gathered = round(work.allgather_bytes / degree / row_bytes / ranks)
        self.gather_splits = [gathered] * ranks
        # What goes through the stages has the sizes of each, not the values of a layer.
        self.a2a = torch.ones(sum(self.splits), HIDDEN)
        self.own = torch.ones(gathered, HIDDEN)
        self.all = torch.ones(gathered * ranks, HIDDEN)
        self.gradient = torch.ones(work.gradient_bytes // 4)
        self.experts = experts(work.expert_flops / degree)

    def compute(self) -> None:
        """Does the experts' part of a chunk."""
        for _ in range(self.times):
            self.experts()

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns what each operation does."""
        inter, intra = self.groups.inter, self.groups.intra
        return {
            "dispatch": lambda i: exchange.all_to_all(self.a2a, self.splits, self.splits, inter),
            "allgather": lambda i, _: exchange.all_gather(self.own, self.gather_splits, intra),
            "expert": lambda i, _: self.compute(),
            "reducescatter": lambda i, _: exchange.reduce_scatter(
                self.all, self.gather_splits, intra
            ),
            "combine": lambda i, _: exchange.all_to_all(self.a2a, self.splits, self.splits, inter),
            "gradient": lambda i: exchange.all_reduce(self.gradient, inter),
        }


def run_once(layer: Layer, contender: Contender) -> float:
    """Returns the milliseconds on this rank, from a time that all agree on."""
    when = torch.tensor([time.monotonic() + LEAD_SECONDS], dtype=torch.float64)
    dist.broadcast(when, 0)
    begin = float(when)
    functions = layer.functions()
    time.sleep(max(0.0, begin - time.monotonic()))
    ThreadStreams().run(contender.schedule, functions)
    return 1000 * (time.monotonic() - begin)


def rounds(
    make: Callable[[int], Layer],
    rows: Sequence[Contender],
    times: dict[str, list[float]],
    repetitions: int,
    draw: random.Random,
) -> None:
    """Runs each contender so many times more, in a drawn order; the slowest rank counts."""
    layers = {row.degree: make(row.degree) for row in rows}
    order = [row for row in rows for _ in range(repetitions)]
    draw.shuffle(order)
    own = [run_once(layers[row.degree], row) for row in order]
    slowest = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    for row, took in zip(order, slowest.tolist(), strict=True):
        times.setdefault(row.name, []).append(took)


def measure_pass(
    profile: Profile,
    work: LayerWork,
    backward: bool,
    make: Callable[[int], Layer],
    repetitions: int,
    draw: random.Random,
) -> dict[str, Any]:
    """Returns the medians of all contenders of a pass.

    All run twice; those that may be the best of their kind, the chosen one and the one without
    overlap as often as asked.
    """
    rows, chosen = contenders(profile, work, backward)
    times: dict[str, list[float]] = {}
    first = min(2, repetitions)
    rounds(make, rows, times, first, draw)
    ranked = sorted(rows, key=lambda row: statistics.median(times[row.name]))
    near = [
        row
        for row in ranked
        if row.name == chosen
        or row in [own for own in ranked if own.kind == row.kind][: FASTEST[row.kind]]
    ]
    if repetitions > first:
        rounds(make, near, times, repetitions - first, draw)
    return {
        "phase": "backward" if backward else "forward",
        "chosen": chosen,
        "rows": [
            {
                "name": row.name,
                "kind": row.kind,
                "predicted_ms": row.predicted_ms,
                "median_ms": statistics.median(times[row.name]),
                "times_ms": times[row.name],
            }
            for row in rows
        ],
    }


def measure_case(
    groups: NodeGroups,
    profile: Profile,
    case: Case,
    repetitions: int,
    draw: random.Random,
    real: tuple[LinearCost, Experts] | None = None,
) -> list[dict[str, Any]]:
    """Measures both passes of a layer; `real`: the cost of experts that compute, and they."""
    work, experts = case.work, padded
    if real is not None:
        line, experts = real
        profile = replace(profile, gemm=line)
        work = replace(work, expert_flops=line.units_within(case.expert_ms))
    results = []
    for backward in (False, True):
        told = measure_pass(
            profile,
            work,
            backward,
            partial(Layer, groups, work, experts, backward),
            repetitions,
            draw,
        )
        results.append({"case": asdict(case), **told})
        if dist.get_rank() == 0:
            own = {row["name"]: row for row in told["rows"]}[told["chosen"]]
            print(
                f"{case} {told['phase']}{' real' if real else ''}: {told['chosen']}, "
                f"{own['median_ms']:.0f} ms, predicted {own['predicted_ms']:.0f}",
                flush=True,
            )
    return results


def real_experts(groups: NodeGroups) -> tuple[LinearCost, Experts]:
    """Measures experts that compute for all of their time, on all ranks at once."""
    shape = ExpertShape(HIDDEN, 4 * HIDDEN)
    probe = expert_probes(groups, shape, MIB, MIB)["gemm"]
    samples = measure({"gemm": probe}, groups.whole, Effort(budget_seconds=10))
    line, _ = fit_linear(*zip(*samples["gemm"], strict=True))
    return line, lambda flops: probe.make(max(1, round(flops / shape.flops(1))))


def main() -> None:
    """Profiles, measures and writes."""
    result, numbers, repetitions = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = NodeGroups.make(dist.group.WORLD, read_node_map(dist.get_world_size()))
    layout = len(groups.nodes), len(groups.nodes[0])
    start = time.monotonic()
    probe = Probe(
        [round(ms * FLOPS_PER_MS) for ms in (10, 20, 40, 80, 160)],
        float,
        padded,
    )
    measured = load_or_measure(
        groups,
        ExpertShape(HIDDEN, HIDDEN),
        fit_linear,
        effort=Effort(largest_ms=250, budget_seconds=45),
        largest_bytes=24 * MIB,
        smallest_bytes=MIB // 8,
        instead={"gemm": probe},
    )
    profiling_seconds = time.monotonic() - start
    profile = Profile.of(measured.lines, measured.quality)
    draw = random.Random(0)
    results, real = [], []
    for number, case in enumerate(CASES[layout]):
        if not numbers or number in numbers:
            results += measure_case(groups, profile, case, repetitions, draw)
    if len(groups.nodes[0]) > 1:
        computing = real_experts(groups)
        real = measure_case(groups, profile, REAL, repetitions, draw, computing)
    if dist.get_rank() == 0:
        told = {
            "nodes": layout[0],
            "ranks_per_node": layout[1],
            "profiling_seconds": profiling_seconds,
            "lines": {
                name: {
                    "alpha_ms": measured.lines[name].alpha_ms,
                    "beta": measured.lines[name].beta,
                    **asdict(measured.quality[name]),
                }
                for name in measured.lines
            },
            "distrust": profile.distrust(),
            "samples": measured.samples,
            "results": results,
            "real": real,
        }
        result.write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
