"""Whether the next generation can be formed now, and of whom."""

from megatron_resilient.elastic.decisions.boundary import depart
from megatron_resilient.elastic.decisions.end import end
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.seating import assign, seat_all
from megatron_resilient.elastic.messages import Exit
from megatron_resilient.elastic.roster import Process
from megatron_resilient.elastic.world import Seat


def form(job: Job, now: float) -> None:
    """Forms the next generation if it can be."""
    if job.live or job.awaited:
        return
    # Who leaves goes after a boundary, when its state was handed over. After a failure it was
    # not: then the leaver takes part once more.
    departing = job.departing if job.cause == "leave" else frozenset()
    survivors = [p for p in job.members() if p.node not in departing]
    if job.givers() or any(not process.waits for process in survivors):
        return
    chosen = [
        process
        for process in job.complete()
        if process.node not in departing
        and (job.is_needed(process) or process.node not in job.leaving)
    ]
    seats, _ = assign(job, chosen)
    if departing and seats:
        depart(job, departing)
        job.departing = frozenset()  # once: whoever returns under such an id while we wait stays
    elif departing:
        # Somebody has to save what they all hold.
        leavers = [p for p in job.members() if p.node in departing]
        if any(not process.waits for process in leavers):
            return
        chosen = job.complete()
        seats, _ = assign(job, chosen)
        job.ending = job.ending or Exit(
            1, "TooFewNodesError", "the nodes that stay when others leave are too few to train"
        )
    if not job.generation and not _may_start(job, now, chosen):
        return
    final = job.ending is not None
    short = _shortage(job, chosen, seats)
    if not short:
        job.short_since = None
    elif not final:
        if not _wait_for_more(job, now, short, survivors, bool(seats)):
            return
        final = job.ending is not None
    if not seats:
        if final and job.ending is not None:
            end(job, job.ending.code, job.ending.error, job.ending.message)
        return
    if not survivors and job.generation and not job.quiet(now, chosen):
        return
    if job.store_port is not None:
        seat_all(job, now, chosen, final)


def _may_start(job: Job, now: float, ready: list[Process]) -> bool:
    if job.is_young(now):  # those that came first may be the spares of a job that lives
        return False
    most = job.most_nodes()
    enough = most is not None and len({process.node for process in ready}) >= most
    return enough or job.quiet(now, ready)


def _shortage(job: Job, chosen: list[Process], seats: tuple[Seat, ...]) -> str:
    """Says what keeps the next generation from being formed; empty if nothing does."""
    before = {slot[0] for slot in job.slots}
    here = before.intersection(process.node for process in chosen)
    dead = {node for node, proven in job.lost.items() if proven} | job.left
    silent = {node for node, proven in job.lost.items() if not proven} - here
    if silent and 2 * len(here) < len(before - (dead - here)):
        return "partition"
    nodes = {process.node for process in chosen}
    return "" if seats and len(nodes) >= job.least_nodes() else "nodes"


def _wait_for_more(
    job: Job, now: float, short: str, survivors: list[Process], enough_to_save: bool
) -> bool:
    """Waits, and at last ends; returns whether a last generation is to be formed."""
    if not job.generation:
        return False
    if job.short_since is None or job.short_of != short:
        job.short_since, job.short_of = now, short
        what = "too few nodes" if short == "nodes" else "the smaller side of a cut"
        limit = job.limits.rejoin_timeout
        job.log(f"{what}: waiting up to {limit:g} s for others")
    if now - job.short_since < job.limits.rejoin_timeout:
        return False
    limit = job.limits.rejoin_timeout
    if short == "partition":
        silent = ", ".join(n for n, proven in job.lost.items() if not proven)
        end(
            job,
            1,
            "PartitionError",
            f"nodes {silent} fell silent and are the larger part, so they may go on without "
            f"us; they did not come back within {limit:g} s. Check the network and start again",
        )
        return False
    why = (
        f"fewer than {job.least_nodes()} nodes, or too few for one block of TP x CP x PP, for "
        f"{limit:g} s; start more nodes, or lower --nnodes"
    )
    if survivors and enough_to_save:
        job.ending = Exit(1, "TooFewNodesError", why)
        return True
    end(job, 1, "TooFewNodesError", why)
    return False
