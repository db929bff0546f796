"""The RecoveryReport: one line and one event per recovery."""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args

from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.elastic.seats import node_order
from megatron_resilient.mcore.recovery.rejoined import Rejoined

PHASES = ("detect", "fence", "plan", "rebuild", "refill", "first_step")


def tell(session: Any, rejoined: Rejoined, record: Any) -> None:
    """Writes the report of a recovery whose first step is done. Collective over all ranks.

    Args:
        session: of this process.
        rejoined: how the state came.
        record: the run's record.
    """
    seconds = _seconds(session)
    # The slowest rank decides each phase; bytes add up.
    slowest = torch.tensor(
        [seconds[phase] for phase in PHASES],
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    moved = torch.tensor([rejoined.bytes], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(moved)
    seconds = dict(zip(PHASES, slowest.tolist(), strict=True))
    world = session.world
    # A newcomer does not know whom generations before its own had lost.
    told = gather_json(session.changes)
    lost, joined = ({node for each in told for node in each[i]} for i in (0, 1))
    here = {seat.node for seat in world.seats}
    facts = {
        "seconds": seconds,
        "cause": world.cause,
        "lost_nodes": sorted(lost, key=node_order),
        "joined_nodes": sorted(joined & here, key=node_order),
        "world_size": len(world.seats),
        "source": rejoined.source,
        "bytes": int(moved.item()),
        "experts_moved": rejoined.experts_moved,
        "lost_steps": rejoined.lost_steps,
        "lost_tokens": rejoined.lost_steps * get_args().global_batch_size * get_args().seq_length,
        "lost_experts": [list(each) for each in rejoined.lost_experts],
        "lost_expert_tokens": rejoined.lost_expert_tokens,
    }
    if not record.speaks:
        return
    record.write("recovery", **facts)
    record.plot("resilient/recovery_seconds", sum(seconds.values()))
    record.plot("resilient/world_size", len(world.seats))
    print(line(rejoined.step, facts), flush=True)


def line(step: int, facts: dict[str, Any]) -> str:
    """Returns the report as one line for the log."""
    seconds = facts["seconds"]
    phases = ", ".join(f"{phase} {seconds[phase]:.2f}" for phase in PHASES)
    nodes = [f"-{node}" for node in facts["lost_nodes"]]
    nodes += [f"+{node}" for node in facts["joined_nodes"]]
    text = (
        f"RecoveryReport: {facts['cause']} ({' '.join(nodes) or 'same nodes'}): "
        f"{facts['world_size']} ranks go on after step {step}, {sum(seconds.values()):.2f} s "
        f"({phases}), state from {facts['source']}, {facts['bytes']} bytes, "
        f"{facts['experts_moved']} experts moved, {facts['lost_steps']} steps lost"
    )
    if facts["lost_experts"]:
        text += f", experts from the checkpoint: {facts['lost_experts']}"
    return text


def _seconds(session: Any) -> dict[str, float]:
    """Returns the phases, one after the other; those of the coordinator's clock by its times."""
    times, clock = session.world.times, session.clock
    now = time.time()
    evidence = times.get("evidence", clock.get("left", now))
    marks = [
        times.get("last_sign", evidence),
        evidence,
        clock.get("ready", clock.get("left", evidence)),
        clock["formed"],
        clock.get("built", clock["formed"]),
        clock.get("filled", now),
        now,
    ]
    return {
        phase: max(0.0, after - before)
        for phase, (before, after) in zip(PHASES, itertools.pairwise(marks), strict=True)
    }
