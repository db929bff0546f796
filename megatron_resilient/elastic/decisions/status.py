"""What `status` shows of a job."""

from typing import Any

from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.roster import Slot
from megatron_resilient.elastic.seats import node_order


def describe(job: Job, now: float) -> dict[str, Any]:
    """Returns the answer to `status`, as plain values."""
    rank_of = {slot: rank for rank, slot in enumerate(job.slots)}
    members = {process.slot: process for process in job.processes.values() if process.member}
    leader = next((members[s].report for s in job.slots if s in members), {})
    reports = [leader, *(process.report for process in members.values())]

    def fact(name: str) -> Any:
        return next((report[name] for report in reports if name in report), None)

    nodes = sorted(job.processes.nodes() | job.agents.keys())
    return {
        "phase": _phase(job),
        "generation": job.generation,
        "world_size": len(job.slots),
        "step": job.step(),
        "tokens_per_second": fact("tokens_per_second"),
        "imbalance": fact("imbalance"),
        # Each rank speaks for its pipeline stage.
        "guaranteed_losses": min(
            (r["guaranteed_losses"] for r in reports if "guaranteed_losses" in r), default=None
        ),
        "min_nodes": job.least_nodes(),
        "nodes": [
            _describe_node(job, now, node, rank_of) for node in sorted(nodes, key=node_order)
        ],
        "stragglers": list(job.stragglers.nodes),
        "last_recovery": job.last_recovery,
    }


def _phase(job: Job) -> str:
    if job.ended is not None:
        return "over"
    if job.awaited:
        return "members are coming back"
    if job.live:
        if job.final:
            return "saving to end"
        return "waiting for a step boundary" if job.pausing else "training"
    if job.short_since is not None:
        return "waiting for nodes"
    return "recovering" if job.generation else "waiting for nodes"


def _describe_node(job: Job, now: float, node: str, rank_of: dict[Slot, int]) -> dict[str, Any]:
    there = sorted(job.processes.of(node), key=lambda process: process.slot)
    agent = job.agents.get(node)
    heard = [process.heard for process in there] or ([agent.heard] if agent else [])
    if any(process.member for process in there):
        role = "leaving" if node in job.leaving else "member"
    elif not there:
        role = "starting"
    else:
        role = "spare" if all(process.waits for process in there) else "joining"
    return {
        "node": node,
        "role": role,
        "ranks": [rank_of[p.slot] for p in there if p.member and p.slot in rank_of],
        "pids": [process.hello.pid for process in there],
        "agent_pid": agent.hello.pid if agent else None,
        "step": max((s for p in there if type(s := p.report.get("step")) is int), default=None),
        "silent_seconds": round(now - min(heard), 3) if heard else None,
        "straggler": node in job.stragglers.nodes,
    }
