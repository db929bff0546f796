"""The next generation begins: everybody in it is told its rank."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_resilient.elastic.decisions.agreement import check_state
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.messages import Seated
from megatron_resilient.elastic.orders import CloseStore
from megatron_resilient.elastic.roster import Process
from megatron_resilient.elastic.seats import Candidate, assign_seats, node_order
from megatron_resilient.elastic.world import Seat


def assign(job: Job, chosen: Iterable[Process]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
    """Returns the seats by rank, and the spares, if those that were chosen are seated."""
    candidates = [
        Candidate(Seat(*process.slot, process.ready.state), process.member)
        for process in chosen
        if process.ready is not None
    ]
    if not candidates:
        return (), ()
    grid = job.settings[1] if job.settings else check_state(candidates[0].seat.state)
    return assign_seats(candidates, grid)


def seat_all(job: Job, now: float, chosen: list[Process], final: bool) -> None:
    """Begins the next generation.

    Args:
        job: The job; its store for that generation listens.
        now: The clock.
        chosen: Those that wait and may be seated.
        final: It is there to save, and to end.
    """
    seats, spares = assign(job, chosen)
    donors = tuple(spare for spare in spares if "step" in spare.state)
    before = {process.node for process in chosen if process.member}
    previous = sorted({slot[0] for slot in job.slots}, key=node_order)
    of_slot = {process.slot: process for process in chosen}
    here = {seat.node for seat in seats}
    lost = tuple(node for node in previous if node not in here or node not in before)
    standing_by = {process.node for process in chosen} - here
    joined = tuple(sorted(here - before, key=node_order))
    unix = now + job.unix_offset
    first = job.generation == 0
    world = Seated(
        generation=job.next_generation,
        seats=seats,
        rank=0,
        store_host="",
        store_port=job.store_port or 0,
        cause=job.cause,
        lost_nodes=lost,
        joined_nodes=joined,
        planned=all(node in job.left or node in standing_by for node in lost),
        times={
            # Of a loss that was noticed by silence; others are noticed at once.
            "last_sign": unix if first else (job.last_sign or job.evidence_at),
            "evidence": unix if first else job.evidence_at,
            "fence": unix if first else job.evidence_at,
            "formed": unix,
        },
        final=final,
        donors=donors,
        newest_step=job.newest_step,
    )
    if job.generation > 1:
        job.orders.append(CloseStore(job.generation - 1))
    job.generation, job.formed, job.final = job.next_generation, unix, final
    job.next_generation, job.store_port = job.next_generation + 1, None
    job.slots = tuple((seat.node, seat.local_rank) for seat in seats)
    job.live, job.out_until, job.short_since = True, None, None
    job.last_sign = 0.0
    job.progress_at, job.asked_at, job.window_at = now, None, now
    for process in list(job.processes.values()):
        process.member = process.paused = False
        process.busy = []
        if process.finished is not None:
            del job.processes[process.hello.id]
    job.seated = {}
    for rank, slot in enumerate(job.slots):
        process = of_slot[slot]
        order = replace(world, rank=rank, store_host=process.host)
        process.member, process.ready, process.seated_on = True, None, process.key
        job.seated[process.hello.id] = order
        assert process.key is not None
        job.send(process.key, order)
    for rank, donor in enumerate(donors, start=len(seats)):
        process = of_slot[donor.node, donor.local_rank]
        process.ready = None  # it says so again when it has given what it holds
        assert process.key is not None
        job.send(process.key, replace(world, rank=rank, store_host=process.host))
    job.log(
        f"generation {job.generation} ({job.cause}): {len(seats)} ranks on "
        f"{len(here)} nodes"
        + (f", lost {', '.join(lost)}" if lost else "")
        + (f", joined {', '.join(joined)}" if joined else "")
    )
    for node in joined:
        job.record("member_join", member=node, members=len(here))
    for node in lost:
        if node in job.left:
            job.record("member_leave", member=node, members=len(here), planned=True)
    if not first:
        job.last_recovery = {
            "generation": job.generation,
            "cause": job.cause,
            "lost_nodes": list(lost),
            "joined_nodes": list(joined),
            "planned": world.planned,
            "time": unix,
            "seconds_to_form": unix - job.evidence_at,
        }
    job.lost, job.left, job.departing = {}, set(), frozenset()
    job.formed_here = True
