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
    first = not job.generation
    world = _next_world(job, now + job.unix_offset, chosen, final)
    _begin(job, now, world)
    _tell(job, world, chosen)
    _record(job, world)
    if not first:
        job.last_recovery = {
            "generation": world.generation,
            "cause": world.cause,
            "lost_nodes": list(world.lost_nodes),
            "joined_nodes": list(world.joined_nodes),
            "planned": world.planned,
            "time": job.formed,
            "seconds_to_form": job.formed - job.evidence_at,
        }
    job.lost, job.left = {}, set()
    job.announced = job.departing = frozenset()


def _next_world(job: Job, unix: float, chosen: list[Process], final: bool) -> Seated:
    """Returns the world, but for what differs between its processes."""
    seats, spares = assign(job, chosen)
    before = {process.node for process in chosen if process.member}
    previous = sorted({slot[0] for slot in job.slots}, key=node_order)
    here = {seat.node for seat in seats}
    lost = tuple(node for node in previous if node not in here or node not in before)
    standing_by = {process.node for process in chosen} - here
    first = not job.generation
    evidence = unix if first else job.evidence_at
    return Seated(
        generation=job.next_generation,
        seats=seats,
        rank=0,
        store_host="",
        store_port=job.store_port or 0,
        cause=job.cause,
        lost_nodes=lost,
        joined_nodes=tuple(sorted(here - before, key=node_order)),
        planned=bool(lost) and all(node in job.left or node in standing_by for node in lost),
        times={
            # Of a loss that was noticed by silence; others are noticed at once.
            "last_sign": unix if first else (job.last_sign or evidence),
            "evidence": evidence,
            "fence": evidence,
            "formed": unix,
        },
        final=final,
        donors=tuple(spare for spare in spares if "step" in spare.state),
        newest_step=job.newest_step,
    )


def _begin(job: Job, now: float, world: Seated) -> None:
    if job.generation > 1:
        job.orders.append(CloseStore(job.generation - 1))
    job.generation, job.formed, job.formed_here = world.generation, world.times["formed"], True
    job.next_generation, job.store_port = world.generation + 1, None
    job.slots = tuple((seat.node, seat.local_rank) for seat in world.seats)
    job.live, job.final, job.out_until, job.short_since = True, world.final, None, None
    job.last_sign = 0.0
    job.progress_at, job.asked_at, job.window_at = now, None, now
    for process in list(job.processes.values()):
        process.member = process.gives = process.paused = False
        process.busy = []
        if process.finished is not None:
            del job.processes[process.hello.id]


def _tell(job: Job, world: Seated, chosen: list[Process]) -> None:
    of_slot = {process.slot: process for process in chosen}
    job.seated = {}
    for rank, slot in enumerate(job.slots):
        process = of_slot[slot]
        order = replace(world, rank=rank, store_host=process.host)
        process.member, process.ready, process.seated_on = True, None, process.key
        job.seated[process.hello.id] = order
        assert process.key is not None
        job.send(process.key, order)
    for rank, donor in enumerate(world.donors, start=len(world.seats)):
        process = of_slot[donor.node, donor.local_rank]
        # It says so again when it has given what it holds.
        process.ready, process.gives = None, True
        assert process.key is not None
        job.send(process.key, replace(world, rank=rank, store_host=process.host))


def _record(job: Job, world: Seated) -> None:
    lost, joined = world.lost_nodes, world.joined_nodes
    members = len({seat.node for seat in world.seats})
    job.log(
        f"generation {world.generation} ({world.cause}): {len(world.seats)} ranks on "
        f"{members} nodes"
        + (f", lost {', '.join(lost)}" if lost else "")
        + (f", joined {', '.join(joined)}" if joined else "")
    )
    job.record_each("member_join", ({"member": node, "members": members} for node in joined))
    left = [node for node in lost if node in job.left]
    job.record_each(
        "member_leave", ({"member": node, "members": members, "planned": True} for node in left)
    )
