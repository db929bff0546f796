"""Planned changes: a step boundary is asked for when somebody wants to come or to go."""

from collections.abc import Iterable

from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import dismiss
from megatron_resilient.elastic.messages import MEMBERSHIP_CHANGES, BoundaryOrder, Exit, Stop
from megatron_resilient.elastic.seats import node_order


def ask_for_boundary(job: Job, now: float) -> None:
    """Asks for a boundary when somebody wants to come or to go."""
    if not job.is_young(now):
        _release(job)
    if not job.live or job.final or job.awaited:
        return
    leaves = job.leaving.intersection(slot[0] for slot in job.slots)
    # A job that is told to end hears it node by node, and is to save only once.
    go = bool(leaves) and now - job.left_at >= job.rules.leave_window
    if job.pausing:
        agreed = any(process.paused or process.ready for process in job.members())
        if go and not leaves <= job.announced and not agreed:
            _order_boundary(job, leaves)
    elif go or _would_be_seated(job, now):
        job.pausing, job.out_until, job.departing = True, None, frozenset(leaves)
        _order_boundary(job, leaves)


def _would_be_seated(job: Job, now: float) -> bool:
    """Tells whether joiners wait that the next generation would have a seat for."""
    joiners = [
        process
        for process in job.complete()
        if not process.member and process.node not in job.leaving
    ]
    if not joiners:
        return False
    if job.settings is None:  # restarted: what a block is, the members will say
        return job.quiet(now, joiners)
    tp, cp, pp = job.settings[1]
    block = tp * cp * pp
    more = (len(job.slots) + len(joiners)) // block > len(job.slots) // block
    return more and job.quiet(now, joiners)


def _order_boundary(job: Job, leaves: Iterable[str]) -> None:
    # Whoever stops was told of the first order; of a larger one perhaps nobody was in time.
    job.announced = frozenset(leaves)
    for process in job.members():
        if process.key is not None:
            job.send(process.key, boundary_order(job))


def boundary_order(job: Job) -> BoundaryOrder:
    """Returns what members are told that have to stop at a boundary."""
    return BoundaryOrder(MEMBERSHIP_CHANGES, tuple(sorted(job.announced, key=node_order)))


def close_boundary(job: Job, now: float) -> None:
    """Ends the generation once all members stand at the boundary."""
    if not job.pausing or job.awaited:
        return
    members = job.members()
    if any(process.ready for process in members) and job.out_until is None:
        job.out_until = now + job.limits.fence_timeout
    out = (
        process.ready or (process.paused and process.node in job.departing) for process in members
    )
    if members and all(out):
        job.live = job.pausing = False
        job.cause = "leave" if job.departing else "join"
        job.evidence_at = now + job.unix_offset
        job.out_until = now + job.limits.fence_timeout  # if too few stay, leavers are needed too


def _release(job: Job) -> None:
    """Lets those go that leave, and whose state is not needed."""
    if not job.leaving:
        return
    holding = {n for n in job.leaving if any(map(job.is_needed, job.processes.of(n)))}
    depart(job, job.leaving - holding - {slot[0] for slot in job.awaited})


def depart(job: Job, nodes: Iterable[str]) -> None:
    """Lets nodes go that leave as planned."""
    for node in tuple(nodes):
        there = job.processes.of(node)
        if any(process.member for process in there):
            job.left.add(node)
        for process in there:
            dismiss(job, process, Exit(0, "", "left as planned"))
        job.leaving.discard(node)
        agent = job.agents.pop(node, None)
        if agent is not None:
            job.send(agent.key, Stop(0))
            job.by_key[agent.key] = None
