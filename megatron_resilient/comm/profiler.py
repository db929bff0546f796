"""What the links and the experts of this job cost: measured at its start, kept per topology.

FSMoE (arXiv 2501.10714, sections 4.1 and 6.2) measures each operation over sizes and fits a line;
its profile is made once, before training. Here it is made on the job's own groups when a job starts
and after its world has changed, unless it was made before on the same topology.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_resilient.comm import exchange
from megatron_resilient.comm.device import device_of
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.measure import Effort, Probe, Samples, measure
from megatron_resilient.comm.node_groups import NodeGroups
from megatron_resilient.telemetry.atomic import write_text_atomically

FORMAT = 1
# Every operation of a profile, and the name of its slope.
SLOPES = {
    "a2a": "beta_ms_per_byte",
    "allgather": "beta_ms_per_byte",
    "reducescatter": "beta_ms_per_byte",
    "allreduce": "beta_ms_per_byte",
    "gemm": "beta_ms_per_flop",
}
# Tokens of an expert.
_EXPERT_ROWS = tuple(16 << k for k in range(12))


class Line(Protocol):
    """A fitted line."""

    @property
    def alpha_ms(self) -> float:
        """Milliseconds of an operation without work."""

    @property
    def beta(self) -> float:
        """Milliseconds per unit of work."""


# Takes units and milliseconds of an operation's samples; returns the line and how well it fits.
Fit = Callable[[Sequence[float], Sequence[float]], tuple[Line, Any]]


@dataclass(frozen=True)
class ExpertShape:
    """One expert MLP.

    Attributes:
        hidden: its input and output.
        ffn: between its products.
        gated: three products (SwiGLU) instead of two.
        dtype: of its weights and of what is sent.
    """

    hidden: int
    ffn: int
    gated: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def products(self) -> int:
        """Matrix products of a forward pass."""
        return 3 if self.gated else 2

    def flops(self, rows: int) -> float:
        """Floating-point operations of a forward pass of so many tokens."""
        return 2.0 * rows * self.hidden * self.ffn * self.products


@dataclass(frozen=True)
class Topology:
    """What a profile is good for.

    Attributes:
        world: ranks of the job.
        nodes: for each node, its ranks in the group that was measured.
        devices: name of each rank's device.
        backend: of torch.distributed.
        shape: the expert, as text.
        ways: what else the operations' times depend on, as the caller says.
    """

    world: int
    nodes: tuple[tuple[int, ...], ...]
    devices: tuple[str, ...]
    backend: str
    shape: str
    ways: str = ""

    @classmethod
    def of(cls, groups: NodeGroups, shape: ExpertShape, ways: str = "") -> "Topology":
        """Looks at the ranks of `groups.whole`. Collective."""
        backend = dist.get_backend(groups.whole)
        name = torch.cuda.get_device_name() if backend == "nccl" else "cpu"
        return cls(
            dist.get_world_size(),
            groups.nodes,
            tuple(gather_json(name, groups.whole)),
            backend,
            f"{shape.hidden}x{shape.ffn}x{shape.products} {shape.dtype}",
            ways,
        )

    @property
    def key(self) -> str:
        """A short name that differs from that of other topologies."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Measured:
    """A profile with the samples that it was made of.

    Attributes:
        samples: by operation; none for one that this topology does not have (AllGather on nodes of
            one rank).
        lines: the fitted ones.
        quality: how well each fits, as `fit` says.
        reused: it was made by an earlier job.
    """

    samples: Samples
    lines: Mapping[str, Line]
    quality: Mapping[str, Any]
    reused: bool

    def predict_ms(self, operation: str, units: float) -> float:
        """Returns the milliseconds that an operation should take; NaN if it was not measured."""
        line = self.lines.get(operation)
        return math.nan if line is None else line.alpha_ms + units * line.beta


def load_or_measure(
    groups: NodeGroups,
    shape: ExpertShape,
    fit: Fit,
    *,
    folder: Path | None = None,
    effort: Effort | None = None,
    smallest_bytes: int = 1 << 16,
    largest_bytes: int = 1 << 28,
    fresh: bool = False,
    instead: Mapping[str, Probe | None] | None = None,
    ways: str = "",
) -> Measured:
    """Returns this topology's profile, measured now if no earlier job left it in `folder`.

    Collective over `groups.whole`; every rank gets the same. Rank 0 alone reads and writes.

    Args:
        groups: the ranks and their nodes.
        shape: the experts.
        fit: makes a line of samples.
        folder: where profiles are kept, `profile-KEY.json` each; None: nowhere.
        effort: how much is measured.
        smallest_bytes: the smallest message.
        largest_bytes: the largest message, where it does not take too long.
        fresh: measure even if there is one, and replace it.
        instead: probes that take the place of those of the same name; None: it is not measured.
        ways: what else the times depend on; profiles of other ways are not used.
    """
    topology = Topology.of(groups, shape, ways)
    path = None if folder is None else folder / f"profile-{topology.key}.json"
    first = dist.get_rank(groups.whole) == 0
    found = _read(path, topology) if path is not None and first and not fresh else None
    stored = gather_json(found, groups.whole)[0]
    if stored is not None:
        samples = {name: [(u, ms) for u, ms in points] for name, points in stored.items()}
        return _fitted(samples, fit, reused=True)
    own = {**expert_probes(groups, shape, smallest_bytes, largest_bytes), **(instead or {})}
    probes = {name: probe for name, probe in own.items() if probe is not None}
    measured = _fitted(measure(probes, groups.whole, effort), fit, reused=False)
    if path is not None and first:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(to_json(measured, topology), indent=1))
    return measured


def expert_probes(
    groups: NodeGroups, shape: ExpertShape, smallest_bytes: int, largest_bytes: int
) -> dict[str, Probe]:
    """Returns the probes of an MoE layer on these groups.

    Units: of an all-to-all the bytes that a rank sends to others; of an AllGather those of its
    output, of a ReduceScatter those of its input, of an AllReduce those of the buffer.

    Args:
        groups: between nodes all-to-all and AllReduce, inside them AllGather and ReduceScatter.
            One of a single rank has no probes.
        shape: the expert whose products are timed.
        smallest_bytes: where sizes begin; small messages are all latency, and vary most.
        largest_bytes: where they end.
    """
    device = device_of(groups.whole)
    row_bytes = shape.hidden * shape.dtype.itemsize
    probes: dict[str, Probe] = {}

    # All sizes of all operations read the same memory; sizes are rounded to whole ranks.
    most = max(largest_bytes // row_bytes, _EXPERT_ROWS[-1]) + dist.get_world_size(groups.whole)
    buffer = torch.zeros(most, shape.hidden, dtype=shape.dtype, device=device)
    # Products of zeros take a GPU less power, and so less time. A generator of our own: training's
    # random numbers stay as they are.
    generator = torch.Generator(device).manual_seed(0)
    buffer[: _EXPERT_ROWS[-1]].normal_(generator=generator)

    def rows(count: int) -> torch.Tensor:
        return buffer[:count]

    def sizes(multiple: int) -> list[int]:
        """Rows in steps of about 1.6."""
        found: list[int] = []
        size = float(smallest_bytes)
        while size <= largest_bytes:
            count = max(1, round(size / row_bytes / multiple)) * multiple
            if not found or count > found[-1]:
                found.append(count)
            size *= 1.6
        return found

    nodes, locals_ = dist.get_world_size(groups.inter), dist.get_world_size(groups.intra)
    if nodes > 1:
        here = dist.get_rank(groups.inter)

        def all_to_all(count: int) -> Callable[[], object]:
            splits = [0 if peer == here else count // (nodes - 1) for peer in range(nodes)]
            # From each of the others comes what goes to it.
            sent = rows(sum(splits))
            return lambda: exchange.all_to_all(sent, splits, splits, groups.inter)

        def all_reduce(count: int) -> Callable[[], object]:
            own = rows(count)
            return lambda: exchange.all_reduce(own, groups.inter)

        probes["a2a"] = Probe(sizes(nodes - 1), lambda count: count * row_bytes, all_to_all)
        probes["allreduce"] = Probe(sizes(nodes), lambda count: count * row_bytes, all_reduce)
    if locals_ > 1:

        def all_gather(count: int) -> Callable[[], object]:
            part = rows(count // locals_)
            splits = [count // locals_] * locals_
            return lambda: exchange.all_gather(part, splits, groups.intra)

        def reduce_scatter(count: int) -> Callable[[], object]:
            own = rows(count)
            splits = [count // locals_] * locals_
            return lambda: exchange.reduce_scatter(own, splits, groups.intra)

        probes["allgather"] = Probe(sizes(locals_), lambda count: count * row_bytes, all_gather)
        probes["reducescatter"] = Probe(
            sizes(locals_), lambda count: count * row_bytes, reduce_scatter
        )

    weights = [torch.empty(shape.hidden, shape.ffn, dtype=shape.dtype, device=device)]
    weights[0].normal_(generator=generator)
    weights += [weights[0].t()] if not shape.gated else [weights[0], weights[0].t()]

    def experts(count: int) -> Callable[[], object]:
        tokens = rows(count)

        def products() -> torch.Tensor:
            with torch.no_grad():
                wide = tokens @ weights[0]
                if shape.gated:
                    wide = wide * (tokens @ weights[1])
                return wide @ weights[-1]

        return products

    probes["gemm"] = Probe(_EXPERT_ROWS, shape.flops, experts)
    return probes


def to_json(measured: Measured, topology: Topology) -> dict[str, Any]:
    """Returns what a profile's file says; what was not measured costs nothing in it."""
    lines = {}
    for operation, slope in SLOPES.items():
        line = measured.lines.get(operation)
        lines[operation] = {
            "alpha_ms": 0.0 if line is None else line.alpha_ms,
            slope: 0.0 if line is None else line.beta,
        }
    return {
        **lines,
        "format": FORMAT,
        "topology": asdict(topology),
        "samples": measured.samples,
    }


def _read(path: Path, topology: Topology) -> Samples | None:
    """Returns the samples of an earlier job; None if there are none that can be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT or told["topology"] != json.loads(json.dumps(asdict(topology))):
            return None
        return {
            str(name): [(float(units), float(ms)) for units, ms in points]
            for name, points in told["samples"].items()
        }
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # written by another version: it is measured anew, and replaced


def _fitted(samples: Samples, fit: Fit, reused: bool) -> Measured:
    lines, quality = {}, {}
    for operation, points in samples.items():
        lines[operation], quality[operation] = fit(*zip(*points, strict=True))
    return Measured(samples, lines, quality, reused)
