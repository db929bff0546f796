"""Plans how communication and experts of every MoE layer overlap, from measured costs."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_resilient.commands.flag_types import count
from megatron_resilient.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_resilient.algorithms.cost_model import Profile
    from megatron_resilient.algorithms.lanes import Operation
    from megatron_resilient.algorithms.layer_schedule import LayerSchedule
    from megatron_resilient.algorithms.pipelining import PhasePlan

HELP = "plan pipeline degrees, orders and gradient slices from a profile"

_WIDTH_OF_FILES = 132
# The picture of a layer: characters for its whole time.
_PICTURE_COLUMNS = 72
_COLOURS = {
    "dispatch": "blue",
    "combine": "cyan",
    "gradient": "red",
    "allgather": "green",
    "reducescatter": "yellow",
    "expert": "magenta",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--profile",
        required=True,
        metavar="FILE",
        help='costs: {"a2a": {"alpha_ms": .., "beta_ms_per_byte": ..}, "allgather": .., '
        '"reducescatter": .., "allreduce": .., "gemm": {"alpha_ms": .., "beta_ms_per_flop": ..}}',
    )
    parser.add_argument(
        "--layers",
        required=True,
        metavar="FILE",
        help='work of a rank: {"max_degree": R, "layers": [{"a2a_bytes": .., "allgather_bytes": '
        '.., "reducescatter_bytes": .., "expert_flops": .., "gradient_bytes": .., '
        '"dense_backward_ms": ..}, ...]}, in forward order',
    )
    parser.add_argument(
        "--uneven-chunks",
        action="store_true",
        help="allow chunks of unequal size where they gain at least 1%%",
    )
    parser.add_argument(
        "--layer", type=count(0), default=0, metavar="L", help="layer whose backward pass is drawn"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 0; files that cannot be read raise."""
    from megatron_resilient.algorithms.layer_schedule import schedule_layers
    from megatron_resilient.algorithms.schedule_files import read_layers, read_profile

    profile = read_profile(args.profile)
    max_degree, layers = read_layers(args.layers)
    if args.layer >= len(layers):
        raise ConfigError(f"--layer {args.layer}: {args.layers} has layers 0 to {len(layers) - 1}")
    schedule = schedule_layers(profile, layers, max_degree, uneven=args.uneven_chunks)
    for reason in profile.distrust():
        print(f"megatron-resilient schedule: {args.profile}: {reason}", file=sys.stderr)
    if args.json:
        print(json.dumps(describe(schedule, profile)))
    else:
        _show(schedule, profile, args.layer)
    return 0


def describe(schedule: Sequence["LayerSchedule"], profile: "Profile") -> dict[str, Any]:
    """Returns the JSON document of a schedule.

    The slices of a layer are those beside its MoE layer's and its dense backward pass, and what is
    sent after all of the backward pass, which only the first layer can have.
    """
    from megatron_resilient.algorithms.schedule_files import describe_profile

    return {
        "layers": [
            {
                "forward": _phase(layer.forward),
                "backward": _phase(layer.backward),
                "gradient_slices_bytes": [
                    layer.gradients.moe_bytes,
                    layer.gradients.dense_bytes,
                    layer.gradients.after_bytes,
                ],
                "exposed_gradient_ms": layer.exposed_gradient_ms,
            }
            for layer in schedule
        ],
        "fit": describe_profile(profile),
    }


def _phase(plan: "PhasePlan") -> dict[str, Any]:
    document: dict[str, Any] = {
        "degree": plan.degree,
        "order": plan.order,
        "predicted_ms": plan.predicted_ms,
        "by_degree": {str(degree): ms for degree, ms in enumerate(plan.by_degree_ms, start=1)},
    }
    if plan.is_uneven:
        document["fractions"] = list(plan.fractions)
    return document


def _show(schedule: Sequence["LayerSchedule"], profile: "Profile", drawn: int) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    console.print(_layers(schedule), "", _totals(schedule), "", _fit(profile), "", sep="\n")
    layer = schedule[drawn]
    console.print(
        f"Layer {drawn}, backward, {layer.backward.predicted_ms:.2f} ms", _picture(layer), sep="\n"
    )


def _layers(schedule: Sequence["LayerSchedule"]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layers")
    for phase in ("forward", "backward"):
        table.add_column(phase, justify="right", no_wrap=True)
        table.add_column("order", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
        table.add_column("uncut", justify="right", no_wrap=True)
    for heading in ("MiB in MoE", "in dense", "after", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, layer in _runs(schedule):
        cells: list[str] = []
        for plan in (layer.forward, layer.backward):
            cells += [
                f"{plan.degree}{' uneven' if plan.is_uneven else ''}",
                plan.order,
                f"{plan.predicted_ms:.2f}",
                f"{plan.by_degree_ms[0]:.2f}",
            ]
        gradients = layer.gradients
        for size in (gradients.moe_bytes, gradients.dense_bytes, gradients.after_bytes):
            cells.append(f"{size / 2**20:.2f}" if size else "-")
        table.add_row(name, *cells, f"{layer.exposed_gradient_ms:.2f} ms")
    return table


def _runs(schedule: Sequence["LayerSchedule"]) -> list[tuple[str, "LayerSchedule"]]:
    """Returns one entry for each run of layers that do the same."""
    runs: list[tuple[int, int, LayerSchedule]] = []
    for index, layer in enumerate(schedule):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], index, layer)
        else:
            runs.append((index, index, layer))
    return [
        (str(first) if first == last else f"{first}-{last}", layer) for first, last, layer in runs
    ]


def _totals(schedule: Sequence["LayerSchedule"]) -> str:
    forward = sum(layer.forward.predicted_ms for layer in schedule)
    backward = sum(layer.backward.predicted_ms for layer in schedule)
    alone = sum(
        layer.forward_costs.sequential_ms + layer.backward_costs.sequential_ms for layer in schedule
    )
    exposed = sum(layer.exposed_gradient_ms for layer in schedule)
    return (
        f"MoE layers: forward {forward:.1f} ms, backward {backward:.1f} ms, slices included; "
        f"uncut and without slices {alone:.1f} ms.\n"
        f"Gradients prolong the step by {exposed:.1f} ms."
    )


def _fit(profile: "Profile") -> "Table":
    from rich.table import Table

    from megatron_resilient.algorithms.cost_model import OPERATIONS

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("operation")
    for heading in ("alpha ms", "rate", "R2", "largest error"):
        table.add_column(heading, justify="right")
    for name, unit in OPERATIONS.items():
        cost, quality = profile.cost(name), profile.quality.get(name)
        # Units per millisecond are thousands a second: GB/s and TFLOP/s.
        scale, rate = (1e6, "GB/s") if unit == "byte" else (1e9, "TFLOP/s")
        error = None if quality is None else quality.max_relative_error
        table.add_row(
            name,
            f"{cost.alpha_ms:.4g}",
            f"{1 / cost.beta / scale:.4g} {rate}" if cost.beta else "unlimited",
            "not known" if quality is None else f"{quality.r2:.4f}",
            "not known" if error is None else f"{error:.0%}",
        )
    return table


def _picture(layer: "LayerSchedule") -> "Table":
    """Draws three lanes: D dispatch, A AllGather, E expert, R ReduceScatter, C combine, G slice."""
    from rich.table import Table

    picture = Table.grid(padding=(0, 2, 0, 0))
    total = layer.backward.predicted_ms
    for stream, lane in layer.lanes(backward=True).items():
        picture.add_row(stream, _lane(lane, total))
    legend = " ".join(
        f"[{colour}]{_letter(stage)}[/] {stage}" for stage, colour in _COLOURS.items()
    )
    picture.add_row("", legend)
    return picture


def _letter(stage: str) -> str:
    return stage[0].upper()


def _lane(lane: Sequence["Operation"], total_ms: float) -> str:
    """Returns one lane, in which neighbours of one kind alternate between capital and small."""
    cells = ["·"] * _PICTURE_COLUMNS
    for own in lane:
        first = round(own.start_ms / total_ms * _PICTURE_COLUMNS) if total_ms else 0
        last = round(own.end_ms / total_ms * _PICTURE_COLUMNS) if total_ms else 0
        letter = _letter(own.stage) if own.chunk % 2 == 0 else _letter(own.stage).lower()
        for column in range(first, last):
            cells[column] = f"[{_COLOURS[own.stage]}]{letter}[/]"
    return "".join(cells)
