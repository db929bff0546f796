"""What workers, agents and users say, and what follows from it at once."""

from megatron_resilient.elastic.decisions.agreement import agree, check_state, refuse_other_settings
from megatron_resilient.elastic.decisions.end import end
from megatron_resilient.elastic.decisions.fence import fence
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import lose
from megatron_resilient.elastic.decisions.status import describe
from megatron_resilient.elastic.messages import (
    Answer,
    Beat,
    Evidence,
    Finish,
    Leave,
    Paused,
    Ready,
    StatusQuery,
    ToServer,
    Whereabouts,
    WorkerExit,
)
from megatron_resilient.elastic.roster import Agent, Process
from megatron_resilient.elastic.seats import node_order
from megatron_resilient.error_report import WRONG_USAGE
from megatron_resilient.errors import ProtocolError


def hear_worker(job: Job, now: float, process: Process, message: ToServer) -> None:
    """Takes in what a worker says.

    Raises:
        ProtocolError: see `Membership.received`.
    """
    if isinstance(message, Beat):
        _hear_beat(job, now, process, message)
    elif isinstance(message, Ready):
        _hear_ready(job, now, process, message)
    elif isinstance(message, Evidence):
        if process.member and message.generation == job.generation:
            fence(job, now, f"node {process.node}: {message.cause}")
    elif isinstance(message, Paused):
        process.paused = True
        job.departing |= job.announced.intersection(message.leaving)
        job.progress_at = now
    elif isinstance(message, Finish):
        _hear_finish(job, now, process, message)
    elif isinstance(message, Whereabouts):
        process.in_collective, process.at = message.in_collective, message.at
    else:
        raise ProtocolError(f"a worker may not say {message.TYPE!r}")


def _hear_beat(job: Job, now: float, process: Process, beat: Beat) -> None:
    process.report = beat.report
    gets_on = beat.progress != process.progress
    process.progress = beat.progress
    if not process.member or beat.generation != job.generation:
        return
    _note_step(job, beat.report.get("step"))
    if gets_on:
        job.progress_at, job.asked_at = now, None
    if beat.busy is not None and job.live:
        process.busy.append(beat.busy)


def _note_step(job: Job, step: object) -> None:
    if not isinstance(step, int) or not job.live:
        return
    if job.newest_step_of != job.generation:  # it may have gone back to a checkpoint
        job.newest_step_of, job.newest_step = job.generation, step
    job.newest_step = max(job.newest_step, step)


def _hear_ready(job: Job, now: float, process: Process, ready: Ready) -> None:
    check_state(ready.state)
    if process.member and _is_answered(job, process, ready):
        return
    if process.ready is None:
        process.arrived = now
    process.ready, process.gives = ready, False
    if process.member and job.live and not job.pausing:
        fence(job, now, f"node {process.node} left generation {job.generation}")
    before = job.settings
    agree(job, process, ready)
    # The others were compared when they were ready, unless what counts is another now.
    others = [] if job.settings is before else list(job.processes.values())
    for other in others or [process]:
        refuse_other_settings(job, now, other)


def _is_answered(job: Job, process: Process, ready: Ready) -> bool:
    """Tells whether a `ready` was said before the process heard of the seat that it has."""
    if ready.after is None or ready.after >= job.generation:
        return False
    held = process.hello.world
    knows = held is not None and held.generation == job.generation
    return knows or process.seated_on == process.key


def _hear_finish(job: Job, now: float, process: Process, finish: Finish) -> None:
    if finish.error and process.member and job.ending is None:
        process.finished = finish.exit
        code = WRONG_USAGE if finish.exit == WRONG_USAGE else 1
        end(job, code, finish.error, finish.message)
        return
    if finish.exit and job.ending is None:
        why = f"a worker ended with exit code {finish.exit}"
        lose(job, now, process.node, why, True, spare=process)
    process.finished = finish.exit


def hear_agent(job: Job, now: float, agent: Agent, message: ToServer) -> None:
    """Takes in what an agent says.

    Raises:
        ProtocolError: see `Membership.received`.
    """
    if isinstance(message, WorkerExit):
        _hear_exit(job, now, agent.hello.node, message)
    elif isinstance(message, Leave):
        _leave(job, now, agent.hello.node)
    elif not isinstance(message, Beat):
        raise ProtocolError(f"an agent may not say {message.TYPE!r}")


def _hear_exit(job: Job, now: float, node: str, ended: WorkerExit) -> None:
    if node in job.lost:
        job.lost[node] = True
    slot = (node, ended.local_rank)
    process = next((p for p in job.processes.of(node) if p.slot == slot), None)
    if process is None and slot in job.awaited:
        lose(job, now, node, _how(ended), proven=True)
    elif process is not None and process.hello.pid == ended.pid:
        if ended.status == 0 or process.finished is not None:
            process.finished = process.finished or 0
        else:
            lose(job, now, node, _how(ended), proven=True)


def _how(ended: WorkerExit) -> str:
    what = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
    return f"worker {ended.local_rank} ended with {what}"


def hear_user(job: Job, now: float, key: int, message: ToServer) -> None:
    """Answers a user's command.

    Raises:
        ProtocolError: see `Membership.received`.
    """
    if isinstance(message, StatusQuery):
        job.send(key, Answer(describe(job, now)))
    elif isinstance(message, Leave):
        known = job.processes.nodes() | job.agents.keys()
        if message.node in known:
            _leave(job, now, message.node)
            job.send(key, Answer({"node": message.node, "leaving": True}))
        else:
            there = ", ".join(sorted(known, key=node_order)) or "none yet"
            why = f"there is no node {message.node!r}; there are: {there}"
            job.send(key, Answer({}, why))
    else:
        raise ProtocolError(f"a client may not say {message.TYPE!r}")


def _leave(job: Job, now: float, node: str) -> None:
    if node not in job.leaving:
        job.leaving.add(node)
        job.left_at = now
        job.log(f"node {node} will leave at the next step boundary")
