"""Who is dropped for good: a node that is lost, a process that others have replaced."""

from megatron_resilient.elastic.decisions.fence import fence
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.messages import Exit
from megatron_resilient.elastic.roster import Process


def lose(
    job: Job,
    now: float,
    node: str,
    cause: str,
    proven: bool,
    told: Exit | None = None,
    spare: Process | None = None,
) -> None:
    """Drops a node for good: its processes never come back.

    Args:
        job: The job.
        now: The clock.
        node: The node.
        cause: What was seen.
        proven: It is known to be dead, and not on the other side of a cut.
        told: What its processes are told; by default that the job goes on without them.
        spare: A process that ends by itself.
    """
    there = job.processes.of(node)
    was_member = _has_seat(job, node)
    for process in there:
        if process is spare:
            del job.processes[process.hello.id]
            job.dismissed[process.hello.id] = fenced_exit(node, cause)
            if process.key is not None:
                job.by_key[process.key] = None
        else:
            dismiss(job, process, told or fenced_exit(node, cause))
    if was_member:
        _count(job, now, node, cause, proven)


def lose_members(job: Job, now: float, node: str, cause: str) -> None:
    """Drops what a node had in the latest generation, proven dead; its new processes stay."""
    if not _has_seat(job, node):
        return
    for process in job.processes.of(node):
        if process.member:
            dismiss(job, process, fenced_exit(node, cause))
    _count(job, now, node, cause, proven=True)


def _has_seat(job: Job, node: str) -> bool:
    held = any(process.member for process in job.processes.of(node))
    return held or any(slot[0] == node for slot in job.awaited)


def _count(job: Job, now: float, node: str, cause: str, proven: bool) -> None:
    job.awaited = {slot for slot in job.awaited if slot[0] != node}
    if node in job.lost:
        return
    job.lost[node] = proven
    ranks = [rank for rank, slot in enumerate(job.slots) if slot[0] == node]
    job.log(f"node {node} is lost: {cause}")
    job.record("failure", cause=cause, failed_ranks=ranks, failed_nodes=[node])
    fence(job, now, f"node {node} is lost: {cause}", recorded=True)


def dismiss(job: Job, process: Process, told: Exit) -> None:
    """Sends a process away for good; when it comes back it is told so again."""
    job.processes.pop(process.hello.id, None)
    job.dismissed[process.hello.id] = told
    if process.key is not None:
        job.by_key[process.key] = None
        job.send(process.key, told)


def fenced_exit(node: str, cause: str) -> Exit:
    """Returns what a process is told without which the job goes on."""
    return Exit(
        1,
        "FencedError",
        f"node {node} is a member no longer ({cause}); started again, it joins as a new one",
    )
