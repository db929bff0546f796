"""Who connects: a new process, one that was away, a zombie, or one whose place is taken."""

from megatron_resilient.elastic.decisions.boundary import boundary_order
from megatron_resilient.elastic.decisions.fence import send_fence
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import dismiss, fenced_exit, lose
from megatron_resilient.elastic.decisions.take_over import miss_replaced, take_back
from megatron_resilient.elastic.messages import Exit, Hello, Stop
from megatron_resilient.elastic.roster import Agent, Process


def meet_agent(job: Job, now: float, key: int, hello: Hello) -> None:
    """Takes in an agent, unless its node has one."""
    known = job.agents.get(hello.node)
    if job.ended is not None:
        job.send(key, Stop(job.ended.code))
    elif known is not None and known.hello.id != hello.id:
        text = f"node id {hello.node!r} has an agent already, with pid {known.hello.pid}"
        job.log(f"refused: {text}")
        job.send(key, Stop(2, f"{text}; give each node an id of its own"))
    else:
        if known is not None:
            job.hang_up(known.key)
        job.agents[hello.node] = job.by_key[key] = Agent(hello, key, now)


def meet_worker(job: Job, now: float, key: int, hello: Hello, host: str) -> None:
    """Takes in a new process, or one that was away; who is out for good is told again."""
    known = job.processes.get(hello.id)
    if job.ended is not None:
        job.send(key, Exit(job.ended.code, "", "the job is over"))
    elif hello.id in job.dismissed:
        job.send(key, job.dismissed[hello.id])
    elif known is not None:
        if known.key is not None:
            job.hang_up(known.key)
        known.hello, known.key, known.host = hello, key, host
        known.heard, known.lost_at = now, None
        job.by_key[key] = known
        _remind(job, known)
    else:
        process = Process(hello, key, host, heard=now, arrived=now)
        if not _refuse_duplicate(job, now, process):
            job.processes[hello.id] = job.by_key[key] = process
            if hello.world is not None:
                take_back(job, now, process, hello.world)
            elif job.awaited:
                miss_replaced(job, now)


def _refuse_duplicate(job: Job, now: float, process: Process) -> bool:
    """Refuses a process whose place another one has; a dead one gives it up."""
    for other in job.processes.of(process.node):
        if other.hello.local_world != process.hello.local_world and other.key is not None:
            why = (
                f"node {process.node!r} has {other.hello.local_world} workers, "
                f"not {process.hello.local_world}"
            )
        elif other.slot == process.slot and _supersedes(job, process, other):
            job.awaited.add(other.slot)
            dismiss(job, other, fenced_exit(other.node, "the job went on without it"))
            return False
        elif other.slot == process.slot and other.key is not None and other.finished is None:
            why = (
                f"node {process.node!r} has a worker {process.hello.local_rank} already, with "
                f"pid {other.hello.pid}; give each node an id of its own"
            )
        elif other.slot == process.slot:
            lose(job, now, process.node, "a worker was replaced by a new one", proven=True)
            return False
        else:
            continue
        job.log(f"refused: {why}")
        assert process.key is not None
        job.send(process.key, Exit(2, "RefusedError", why))
        return True
    return False


def _supersedes(job: Job, process: Process, other: Process) -> bool:
    """Tells whether the other is a zombie that came back, after our restart, before this."""
    own, held = process.hello.world, other.hello.world
    return (
        not job.formed_here
        and other.member
        and own is not None
        and held is not None
        and (own.generation, own.formed) == (job.generation, job.formed)
        and held.generation < own.generation
    )


def _remind(job: Job, process: Process) -> None:
    """Says again what a process that was away may have missed."""
    if not process.member:
        return
    assert process.key is not None
    held = process.hello.world
    here = held is not None and (held.generation, held.formed) == (job.generation, job.formed)
    if job.live and not here and job.seated.get(process.hello.id):
        process.seated_on = process.key
        job.send(process.key, job.seated[process.hello.id])
    if not job.live and process.ready is None:
        send_fence(job, process)
    elif job.live and job.pausing:
        job.send(process.key, boundary_order(job))
