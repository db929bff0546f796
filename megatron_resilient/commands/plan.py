"""Plans expert replicas and their placement, and says which losses of nodes they survive."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_resilient.commands.flag_types import count
from megatron_resilient.errors import ConfigError, UnrecoverablePlanError

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_resilient.algorithms.planner import Plan, PlanValue
    from megatron_resilient.algorithms.recovery_probability import Estimate

HELP = "plan expert replicas and their placement"

# What the human report shows of large plans.
_SHOWN_LOSSES = 4
_SHOWN_NODES = 32
_SHOWN_SLOTS = 24
_WIDTH_OF_FILES = 132

# Somebody waits for this plan, but not the training: more is spent on proofs than by default.
_EFFORT = 200_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--loads",
        required=True,
        metavar="PATH",
        help='tokens per expert and layer: {"layers": [[tokens of expert 0, ...], ...]}, or the '
        "folder of a run of ours",
    )
    parser.add_argument("--nodes", required=True, type=count(), metavar="N", help="nodes")
    parser.add_argument(
        "--slots-per-node",
        required=True,
        type=count(),
        metavar="C",
        help="expert replicas that a node has memory for, per layer",
    )
    parser.add_argument(
        "--min-replicas",
        type=count(),
        default=2,
        metavar="F",
        help="fewest replicas of an expert, as far as the slots suffice (default: 2)",
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="racks and failure probabilities; by default all nodes are alike",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=count(),
        default=1,
        metavar="G",
        help="ranks that share a node's slots (default: 1)",
    )
    parser.add_argument(
        "--max-imbalance",
        type=float,
        metavar="X",
        help="accept fewer survivable losses for max/mean tokens per rank of at most X",
    )
    parser.add_argument(
        "--layer", type=count(0), default=0, metavar="L", help="layer whose placement is drawn"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 when the slots cannot hold every expert."""
    from megatron_resilient.algorithms.plan_files import read_loads, read_topology
    from megatron_resilient.algorithms.planner import make_plan, value_plan
    from megatron_resilient.input_files import MOST_SLOTS

    started = time.perf_counter()
    loads = read_loads(args.loads)
    if args.layer >= len(loads):
        raise ConfigError(f"--layer {args.layer}: {args.loads} has layers 0 to {len(loads) - 1}")
    if args.nodes * args.slots_per_node > MOST_SLOTS:
        raise ConfigError(
            f"{args.nodes:,} nodes of {args.slots_per_node:,} slots: more than {MOST_SLOTS:,}"
        )
    topology = read_topology(args.topology) if args.topology else None
    try:
        plan = make_plan(
            loads,
            args.nodes,
            args.slots_per_node,
            min_replicas=args.min_replicas,
            ranks_per_node=args.ranks_per_node,
            topology=topology,
            max_imbalance=args.max_imbalance,
            effort=_EFFORT,
        )
    except UnrecoverablePlanError as error:
        if args.json:
            print(json.dumps(_unrecoverable(args, str(error), time.perf_counter() - started)))
        print(f"megatron-resilient plan: {error}", file=sys.stderr)
        return 1
    value = value_plan(plan, loads, topology=topology)
    seconds = time.perf_counter() - started
    if args.json:
        print(json.dumps(describe(plan, value, seconds)))
    else:
        _show(plan, value, seconds, args.layer)
    return 0


def describe(plan: "Plan", value: "PlanValue", seconds: float) -> dict[str, Any]:
    """Returns the JSON document of a plan."""
    _, nodes, slots_per_node = plan.placement.slots.shape
    document: dict[str, Any] = {
        "nodes": nodes,
        "slots_per_node": slots_per_node,
        "min_replicas": plan.allocations[0].min_replicas,
        "effective_min_replicas": plan.effective_min_replicas,
        "layers": [
            {
                "replicas": list(allocation.replicas),
                "nodes": slots.tolist(),
                "distinct_nodes": list(layer.distinct_nodes),
                "imbalance": layer.imbalance,
                "recovery_probability": _values(layer.recovery),
                **_errors(layer.recovery, "recovery_probability_error"),
                "method": method,
                "optimal": optimal,
            }
            for allocation, slots, layer, method, optimal in zip(
                plan.allocations,
                plan.placement.slots,
                value.layers,
                plan.placement.methods,
                plan.placement.optimal,
                strict=True,
            )
        ],
        "joint_recovery_probability": _values(value.joint_recovery),
        **_errors(value.joint_recovery, "joint_recovery_probability_error"),
        "guaranteed_losses": value.guaranteed_losses,
        "survival_probability": None if value.survival is None else value.survival.value,
        "seconds": seconds,
    }
    if value.survival is not None and value.survival.standard_error > _EXACT:
        document["survival_probability_error"] = value.survival.standard_error
    return document


# Up to this error a probability is called exact.
_EXACT = 1e-9


def _values(estimates: Mapping[int, "Estimate"]) -> dict[str, float]:
    return {str(losses): estimate.value for losses, estimate in estimates.items()}


def _errors(estimates: Mapping[int, "Estimate"], name: str) -> dict[str, dict[str, float]]:
    """Returns standard errors under a name of their own, if any probability was sampled."""
    errors = {str(k): own.standard_error for k, own in estimates.items() if own.standard_error}
    return {name: errors} if errors else {}


def _unrecoverable(args: argparse.Namespace, why: str, seconds: float) -> dict[str, Any]:
    return {
        "nodes": args.nodes,
        "slots_per_node": args.slots_per_node,
        "min_replicas": args.min_replicas,
        "effective_min_replicas": 0,
        "layers": [],
        "joint_recovery_probability": {},
        "guaranteed_losses": None,
        "survival_probability": None,
        "error": why,
        "seconds": seconds,
    }


def _show(plan: "Plan", value: "PlanValue", seconds: float, drawn: int) -> None:
    from rich.console import Console

    _, nodes, slots_per_node = plan.placement.slots.shape
    minimum, asked = plan.effective_min_replicas, plan.allocations[0].min_replicas
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    console.print(f"{nodes} nodes of {slots_per_node} slots, planned in {seconds:.2f} s")
    if minimum < asked:
        console.print(
            f"[yellow]At least {_count(minimum, 'replica')} of every expert, not {asked}: "
            "there are too few slots.[/]"
        )
    else:
        console.print(f"At least {_count(minimum, 'replica')} of every expert.")
    console.print(_losses_line(value))
    if value.survival is not None:
        console.print(f"Survival of the topology's failures: {_probability(value.survival)}")
    console.print("", _layers(plan, value), "", sep="\n")
    console.print(f"Layer {drawn}: the experts on every node", _picture(plan, drawn), sep="\n")


def _losses_line(value: "PlanValue") -> str:
    lost = value.guaranteed_losses
    if lost < 1:
        return "[yellow]Some node must not be lost: an expert has no replica elsewhere.[/]"
    return f"Any {_count(lost, 'node')} may be lost at once."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _layers(plan: "Plan", value: "PlanValue") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer")
    for heading in ("replicas", "nodes", "max/mean"):
        table.add_column(heading, justify="right")
    shown = list(value.joint_recovery)[:_SHOWN_LOSSES]
    for losses in shown:
        table.add_column(f"{losses} lost", justify="right")
    table.add_column("method")
    table.add_column("optimal")
    for index, (allocation, layer) in enumerate(zip(plan.allocations, value.layers, strict=True)):
        table.add_row(
            str(index),
            _range(allocation.replicas),
            _range(layer.distinct_nodes),
            f"{layer.imbalance:.2f}",
            *(_probability(layer.recovery[losses]) for losses in shown),
            plan.placement.methods[index],
            {True: "yes", False: "no", None: "not known"}[plan.placement.optimal[index]],
        )
    joint = [_probability(value.joint_recovery[losses]) for losses in shown]
    table.add_row("all", "", "", "", *joint, "", "", style="bold")
    return table


def _picture(plan: "Plan", layer: int) -> "Table":
    """Draws a layer: a row per node, or per run of nodes that hold the same experts."""
    from rich.table import Table

    picture = Table.grid(padding=(0, 2, 0, 0))
    slots = plan.placement.slots[layer].tolist()
    rows: list[tuple[int, int, list[int]]] = []
    for node, experts in enumerate(slots):
        if rows and rows[-1][2] == experts:
            rows[-1] = (rows[-1][0], node, experts)
        else:
            rows.append((node, node, experts))
    replicas = plan.allocations[layer].replicas
    for first, last, experts in rows[:_SHOWN_NODES]:
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        cells = " ".join(_expert(expert, replicas) for expert in experts[:_SHOWN_SLOTS])
        picture.add_row(name, cells + (" ..." if len(experts) > _SHOWN_SLOTS else ""))
    if len(rows) > _SHOWN_NODES:
        picture.add_row("...", f"{len(slots)} nodes in all")
    return picture


def _expert(expert: int, replicas: Sequence[int]) -> str:
    """Names an expert; the fewer replicas it has, the redder."""
    scarce = sorted(set(replicas)).index(replicas[expert])
    colour = ("red", "yellow", "green")[min(scarce, 2)]
    return f"[{colour}]{expert:>3}[/]"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _probability(estimate: "Estimate") -> str:
    if estimate.standard_error > _EXACT:
        return f"{estimate.value:.3f}±{estimate.standard_error:.3f}"
    # Never shown as certain when it is not.
    text = f"{estimate.value:.4f}"
    return f"1-{1 - estimate.value:.0e}" if text == "1.0000" and estimate.value < 1 else text
