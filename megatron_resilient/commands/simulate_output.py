"""What `megatron-resilient simulate` prints: one document, or tables made of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_resilient.simulation.compare import Options, Result
    from megatron_resilient.simulation.costs import Costs
    from megatron_resilient.simulation.recommendation import Choice, Recommendation
    from megatron_resilient.simulation.trace import Trace
    from megatron_resilient.simulation.workload import Workload

_NOTE = "Simulated from measured costs; nothing was run."
_WIDTH_OF_FILES = 150
_SHOWN_CHOICES = 12


def describe(
    trace: "Trace",
    workload: "Workload",
    costs: "Costs",
    options: "Options",
    results: Sequence["Result"],
    proposal: "Recommendation | None",
    price: float,
) -> dict[str, Any]:
    """Returns the JSON document."""
    mtbf = trace.mean_seconds_between_losses
    return {
        "simulated": True,
        "note": _NOTE,
        "trace": {
            "source": trace.source,
            "hours": trace.seconds / 3600,
            "most_nodes": trace.most_nodes,
            "node_hours": trace.node_seconds / 3600,
            "failures": sum(1 for change in trace.changes if change.lost),
            "nodes_lost": sum(len(change.lost) for change in trace.changes),
            "nodes_left": sum(len(change.left) for change in trace.changes),
            "nodes_joined": sum(len(change.joined) for change in trace.changes),
            "mtbf_minutes": None if math.isinf(mtbf) else mtbf / 60,
        },
        "workload": {
            "nodes": workload.nodes,
            "ranks_per_node": workload.ranks_per_node,
            "experts": workload.experts,
            "moe_layers": workload.moe_layers,
            "checkpoint_bytes": workload.full_bytes,
        },
        "costs": costs.to_plain(),
        "systems": [_system(result, options, trace, price) for result in results],
        "recommendation": None if proposal is None else _proposal(proposal, options, trace, price),
    }


def _system(result: "Result", options: "Options", trace: "Trace", price: float) -> dict[str, Any]:
    accounts, outcome = result.outcome.accounts, result.outcome
    own, policy = result.policy.workload, result.policy
    cost = price * trace.node_seconds / 3600
    replicated = result.system.base == "ours"
    slots = policy.placements.slots(policy.most_nodes)
    return {
        "system": result.system.name,
        "goodput": result.goodput,
        "ettr": result.ettr,
        "steps": result.steps,
        "steps_per_hour": result.steps / result.seconds * 3600,
        "lost_steps": accounts.lost_steps,
        "lost_tokens": outcome.lost_tokens,
        "seconds": {
            "productive": accounts.productive,
            "lost": accounts.lost,
            "stalled": accounts.stalled,
            "recovery": accounts.recovery,
            "idle": accounts.idle,
        },
        "interruptions": outcome.interruptions,
        "joins": outcome.joins,
        "rollbacks": outcome.rollbacks,
        "expert_restores": outcome.expert_restores,
        "cost": cost,
        "cost_per_1000_steps": cost / result.steps * 1000 if result.steps else None,
        "settings": {
            "step_seconds": policy.step_seconds(policy.most_nodes),
            "imbalance": policy.placements.imbalance(policy.most_nodes),
            "slots_per_node": slots.shape[2] * own.ranks_per_node,
            "min_replicas": options.min_replicas if replicated else 1,
            "save_interval": result.settings.interval,
            "checkpoint_experts": result.settings.k,
            "checkpoint_experts_at_end": outcome.k,
            "stall_seconds": policy.stall_seconds(result.settings.k, policy.most_nodes),
            "persist_seconds": policy.persist_seconds(result.settings.k, policy.most_nodes),
        },
    }


def _proposal(
    proposal: "Recommendation", options: "Options", trace: "Trace", price: float
) -> dict[str, Any]:
    chosen = replace(options, min_replicas=proposal.choice.min_replicas)
    return {
        "slots_per_node": proposal.choice.slots_per_node,
        "min_replicas": proposal.choice.min_replicas,
        "save_interval": proposal.choice.interval,
        "checkpoint_experts": proposal.choice.k,
        "guaranteed_losses": proposal.guaranteed_losses,
        "flags": _flags(proposal.choice, proposal.result.policy.workload),
        "predicted": _system(proposal.result, chosen, trace, price),
        "tried": [asdict(own) for own in proposal.tried],
    }


def _flags(choice: "Choice", workload: "Workload") -> str:
    experts = choice.k if choice.k < workload.experts else 0
    return (
        f"--resilient-slots-per-rank {choice.slots_per_node // workload.ranks_per_node} "
        f"--resilient-min-replicas {choice.min_replicas} "
        f"--resilient-checkpoint-format experts --resilient-checkpoint-experts {experts} "
        f"--save-interval {choice.interval}"
    )


def show(document: dict[str, Any]) -> None:
    """Prints the document for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)

    def print_line(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    print_line(f"{document['note']} Costs: {document['costs']['source']}.")
    print_line(_events_line(document["trace"]))
    priced = any(own["cost"] for own in document["systems"])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("system", no_wrap=True)
    headings = ["goodput", "ETTR", "steps/h", "lost", "stalled", "recovery", "idle"]
    headings += ["lost tokens", "save every", "K", "slots", "max/mean"]
    for heading in headings + ["per 1000 steps"] * priced:
        table.add_column(heading, justify="right", no_wrap=True)
    for own in document["systems"]:
        table.add_row(own["system"], *_cells(own, document["trace"]["hours"] * 3600, priced))
    console.print("", table, "", sep="\n")
    if document["recommendation"]:
        _show_proposal(print_line, console.print, document["recommendation"])
    print_line(f"Simulated in {document['seconds']:.1f} s.")


def _events_line(events: dict[str, Any]) -> str:
    every = events["mtbf_minutes"]
    return (
        f"{events['source']}: {events['hours']:.1f} hours, up to {events['most_nodes']} nodes; "
        f"{events['failures']} failures took {events['nodes_lost']} nodes"
        f"{'' if every is None else f', one every {every:.1f} minutes'}; "
        f"{events['nodes_left']} left, {events['nodes_joined']} joined. "
        f"{events['node_hours']:,.0f} node hours."
    )


def _cells(own: dict[str, Any], seconds: float, priced: bool) -> list[str]:
    """Returns the row of one system, without its name."""
    spent, chosen, each = own["seconds"], own["settings"], own["cost_per_1000_steps"]
    cells = [f"{own['goodput']:.3f}", f"{own['ettr']:.3f}", f"{own['steps_per_hour']:,.1f}"]
    cells += [f"{spent[name] / seconds:.1%}" for name in ("lost", "stalled", "recovery", "idle")]
    cells += [
        f"{own['lost_tokens']:.2%}",
        f"{chosen['save_interval']} steps",
        f"{chosen['checkpoint_experts']}",
        f"{chosen['slots_per_node']}",
        f"{chosen['imbalance']:.2f}",
    ]
    if priced:
        cells.append("-" if each is None else f"{each:,.4g}")
    return cells


def _show_proposal(
    print_line: Callable[[str], None], print_table: Callable[..., None], proposal: dict[str, Any]
) -> None:
    from rich.table import Table

    predicted = proposal["predicted"]
    print_line(
        f"Proposed: {proposal['slots_per_node']} slots a node, at least "
        f"{proposal['min_replicas']} replicas, {proposal['checkpoint_experts']} experts of a "
        f"layer every {proposal['save_interval']} steps."
    )
    print_line(f"Nodes that may be lost at once, whichever: {proposal['guaranteed_losses']}.")
    print_line(
        f"Predicted: goodput {predicted['goodput']:.3f}, ETTR {predicted['ettr']:.3f}, "
        f"{predicted['steps_per_hour']:,.1f} steps an hour, lost tokens "
        f"{predicted['lost_tokens']:.2%}."
    )
    print_line(proposal["flags"])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("slots", "replicas", "K", "save every", "steps/h", "lost tokens"):
        table.add_column(heading, justify="right")
    tried = sorted(proposal["tried"], key=lambda own: -own["steps_per_hour"])
    for own in tried[:_SHOWN_CHOICES]:
        table.add_row(
            f"{own['slots_per_node']}",
            f"{own['min_replicas']}",
            f"{own['k']}",
            f"{own['interval']}",
            f"{own['steps_per_hour']:,.1f}",
            f"{own['lost_tokens']:.2%}",
        )
    print_line(f"\nThe best of {len(tried)} choices that were tried:")
    print_table(table, "", sep="\n")
