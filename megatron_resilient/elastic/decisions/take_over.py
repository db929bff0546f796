"""After a restart of the coordinator: the generation that lives is taken over from its members."""

from megatron_resilient.elastic.decisions.fence import fence, send_fence
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import dismiss, fenced_exit, lose_members
from megatron_resilient.elastic.orders import CloseStore
from megatron_resilient.elastic.roster import Process
from megatron_resilient.elastic.world import HeldWorld


def take_back(job: Job, now: float, process: Process, held: HeldWorld) -> None:
    """Meets a process that has a generation, and that we do not know: we were restarted."""
    newer = held.generation > job.generation
    if newer and not job.formed_here and (job.awaited or not job.live):
        _take_over(job, now, held)
    stale = (held.generation, held.formed) != (job.generation, job.formed)
    if process.slot not in job.awaited or (stale and (newer or held.generation >= job.generation)):
        dismiss(job, process, fenced_exit(process.node, "the job went on without it"))
        return
    job.awaited.discard(process.slot)
    # Thousands that come back at once take longer than one is waited for.
    job.awaited_until = max(job.awaited_until, now + job.limits.heartbeat_timeout / 2)
    process.member = True
    process.report = {"step": held.step}
    job.newest_step = max(job.newest_step, held.step)
    if stale or not held.training or not job.live:
        # It did not hear of the newest generation, or has left it: that one cannot go on.
        fence(job, now, "the coordinator was restarted", cause="coordinator")
        send_fence(job, process)
    elif not job.awaited:
        job.log(f"generation {job.generation}: all members are back, training went on")


def _take_over(job: Job, now: float, held: HeldWorld) -> None:
    """Makes the generation that a member holds the latest one."""
    members = [process for process in job.processes.values() if process.member]
    for process in members:
        process.member = False
    job.generation, job.formed = held.generation, held.formed
    # Our predecessor may have announced the next one to members that have not come back yet.
    _renumber(job, held.generation + 2)
    job.slots = tuple((seat.node, seat.local_rank) for seat in held.seats)
    job.awaited = set(job.slots)
    job.awaited_until = now + job.limits.heartbeat_timeout
    job.live, job.pausing, job.cause = True, False, "coordinator"
    job.progress_at, job.asked_at = now, None
    job.lost, job.left, job.short_since = {}, set(), None
    job.log(f"generation {held.generation} of {len(job.slots)} ranks lives: taken over")
    for process in members:
        held_before = process.hello.world
        assert held_before is not None
        take_back(job, now, process, held_before)
    miss_replaced(job, now)


def miss_replaced(job: Job, now: float) -> None:
    """Counts those as lost whose places were found taken by new processes.

    While we were away their agents started them again, and what became of the old ones is not
    said in any order. If a seat was lost on its way, its own process comes as a new one too.
    """
    for process in list(job.processes.values()):
        if process.slot in job.awaited and process.hello.world is None:
            lose_members(job, now, process.node, "a worker was replaced by a new one")


def _renumber(job: Job, number: int) -> None:
    if job.store_port is not None:
        job.orders.append(CloseStore(job.next_generation))
    job.next_generation, job.store_port = number, None
