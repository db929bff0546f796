"""The end of the job."""

from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.messages import Exit, Stop
from megatron_resilient.elastic.orders import End


def end(job: Job, code: int, error: str, message: str) -> None:
    """Ends the job for everybody; `error` is the name of an error, or empty."""
    job.ended = End(code)
    job.live = False
    job.log(f"the job is over: {message}")
    if error:
        job.record("error", message=message, type=error)
    for process in list(job.processes.values()):
        if process.finished is None and process.key is not None:
            job.send(process.key, Exit(code, error, message))
    for agent in job.agents.values():
        job.send(agent.key, Stop(code))
    job.orders.append(job.ended)


def end_if_done(job: Job) -> None:
    """Ends the job when all of the members that are left are done."""
    members = [process for process in job.processes.values() if process.member]
    if not members or job.awaited or any(p.finished is None for p in members):
        return
    if job.ending is not None:
        end(job, job.ending.code, job.ending.error, job.ending.message)
    else:
        end(job, 0, "", "training is done")
