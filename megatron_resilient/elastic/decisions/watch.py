"""Who is silent, stuck, hanging or slow: what nobody says, and only the clock shows."""

from collections import defaultdict

from megatron_resilient.elastic.decisions.fence import fence
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import lose
from megatron_resilient.elastic.messages import Exit, WhereQuery


def notice_silence(job: Job, now: float) -> None:
    """Drops nodes that were not heard of for too long, or that broke off and did not return."""
    for process in list(job.processes.values()):
        if process.hello.id not in job.processes or process.finished is not None:
            continue
        agent = job.agents.get(process.node)
        there = agent is not None and agent.answers(now, job.limits.heartbeat_timeout / 2)
        if now - process.heard > job.limits.heartbeat_timeout:
            why = f"no heartbeat for {now - process.heard:.1f} s"
            if job.live and process.member:
                job.last_sign = process.heard + job.unix_offset
            lose(job, now, process.node, why, proven=there)
        elif (
            process.lost_at is not None
            and agent is None
            and now - process.lost_at > job.rules.grace
        ):
            why = "its connections broke"
            lose(job, now, process.node, why, proven=process.proven)
    if job.awaited and now >= job.awaited_until:
        for node in {slot[0] for slot in job.awaited}:
            lose(job, now, node, "it did not come back to the coordinator", proven=False)


def notice_stuck(job: Job, now: float) -> None:
    """Gives up a main thread that does not come out of a generation that is over."""
    if job.out_until is None or now < job.out_until:
        return
    limit = job.limits.fence_timeout
    if job.live:  # some stand at the boundary, some do not
        fence(job, now, f"not all members came to the boundary within {limit:g} s")
        return
    job.out_until = None
    for process in job.members() + job.givers():
        if process.ready is None and process.hello.id in job.processes:
            why = f"its main thread did not leave the generation within {limit:g} s"
            told = Exit(1, "HangError", f"node {process.node}: {why}")
            lose(job, now, process.node, why, True, told)


def notice_hang(job: Job, now: float) -> None:
    """Asks where everybody is when nothing gets on, and drops those that others wait for."""
    limit = job.limits.hang_timeout
    members = job.members()
    if not (limit and job.live and members) or now - job.progress_at <= limit:
        return
    if job.asked_at is None:
        job.asked_at = now
        for process in members:
            process.in_collective = None
            if process.key is not None:
                job.send(process.key, WhereQuery())
        return
    silent = any(process.in_collective is None for process in members)
    if silent and now - job.asked_at < job.limits.heartbeat_timeout:
        return
    outside = [process for process in members if process.in_collective is False]
    job.progress_at, job.asked_at = now, None
    if len(outside) == len(members):
        # Nobody waits for anybody: a long load or save. Giving all up would end the job.
        at = outside[0].at
        job.log(f"no progress for {limit:g} s, and nobody is in a collective: {at}")
        return
    for process in outside:
        if process.hello.id in job.processes:
            why = f"it hangs in {process.at} while the others wait for it"
            told = Exit(1, "HangError", f"node {process.node}: {why}")
            lose(job, now, process.node, why, True, told)
    fence(job, now, f"no progress for {limit:g} s")


def notice_stragglers(job: Job, now: float) -> None:
    """Reports nodes that are slow; drops nobody."""
    if now - job.window_at < job.rules.straggler_window:
        return
    job.window_at = now
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for process in job.members():
        shares[process.node] += process.busy
        process.busy = []
    means = {node: sum(own) / len(own) for node, own in shares.items() if own}
    slow, middle = job.stragglers.judge(means)
    for node in slow:
        job.log(f"node {node} is slow: busy {means[node]:.0%} of the time, the others less")
        job.record("straggler", member=node, busy=means[node], median_busy=middle)
