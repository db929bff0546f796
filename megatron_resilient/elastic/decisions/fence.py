"""The end of a generation, for all of its members at once."""

from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.messages import Fence
from megatron_resilient.elastic.roster import Process


def fence(
    job: Job, now: float, why: str, *, cause: str = "failure", recorded: bool = False
) -> None:
    """Ends the generation for all of its members at once."""
    if not job.live:
        return
    job.live = job.pausing = False
    job.cause = cause
    job.evidence_at = now + job.unix_offset
    job.out_until = now + job.limits.fence_timeout
    job.log(f"generation {job.generation} is over: {why}")
    if not recorded:
        job.record("failure", cause=why, failed_ranks=[], failed_nodes=[])
    job.fence_text = why
    for process in job.processes.values():
        if (process.member or process.gives) and process.ready is None:
            send_fence(job, process)


def send_fence(job: Job, process: Process) -> None:
    """Tells one process that the generation is over."""
    if process.key is not None:
        order = Fence(job.generation, job.fence_text, job.evidence_at)
        job.send(process.key, order)
