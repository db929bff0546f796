"""Slow and simple references for the overlap planner: events one by one, and all distributions."""

import itertools
import math
from collections.abc import Sequence


def play(durations: Sequence[Sequence[float]], order: str, slice_ms: float = 0.0):
    """Plays one layer through by events.

    Args:
        durations: [5 stages][chunks].
        order: Of the intra stream.
        slice_ms: The gradient slice.

    Returns:
        {(stage, chunk): (start, end)}, with stages 0 to 4 and ("slice", 0), and the makespan.
    """
    chunks = len(durations[0])
    inter = [(0, c) for c in range(chunks)] + [("slice", 0)] + [(4, c) for c in range(chunks)]
    computing = [(2, c) for c in range(chunks)]
    waiting = [(1, c) for c in range(chunks)] + [(3, c) for c in range(chunks)]
    times: dict = {}
    free = {"inter": 0.0, "intra": 0.0, "compute": 0.0}

    def length(operation):
        return slice_ms if operation[0] == "slice" else durations[operation[0]][operation[1]]

    def ready_at(operation):
        """Returns when its input is there, or None while nobody knows."""
        stage, chunk = operation
        if stage in (0, "slice"):
            return 0.0
        before = times.get((stage - 1, chunk))
        return before and before[1]

    def start(stream, operation, at):
        times[operation] = (at, at + length(operation))
        free[stream] = at + length(operation)

    def in_turn(kind):
        return [own for own in waiting if own[0] == kind][:1]

    now = 0.0
    while len(times) < 5 * chunks + 1:
        progress = True
        while progress:  # everything that can start now
            progress = False
            for stream, queue in (("inter", inter), ("compute", computing)):
                if queue and free[stream] <= now:
                    at = ready_at(queue[0])
                    if at is not None and at <= now:
                        start(stream, queue.pop(0), now)
                        progress = True
            if waiting and free["intra"] <= now:
                gathers, scatters = in_turn(1), in_turn(3)
                if order == "gather-first":
                    candidates = gathers or scatters
                elif order == "scatter-first":
                    candidates = scatters + gathers
                else:
                    candidates = sorted(scatters + gathers, key=length, reverse=True)
                for own in candidates:
                    at = ready_at(own)
                    if at is not None and at <= now:
                        waiting.remove(own)
                        start("intra", own, now)
                        progress = True
                        break
        later = [end for _, end in times.values() if end > now]
        if later:
            now = min(later)
    return times, max(times[4, c][1] for c in range(chunks))


def interleavings(chunks: int):
    """Yields all orders of AllGathers (1) and ReduceScatters (3), each kind by chunk."""
    for places in itertools.combinations(range(2 * chunks), chunks):
        order, gathered, scattered = [], 0, 0
        for index in range(2 * chunks):
            if index in places:
                order.append((1, gathered))
                gathered += 1
            else:
                order.append((3, scattered))
                scattered += 1
        seen: set = set()
        for stage, chunk in order:
            if stage == 3 and (1, chunk) not in seen:
                break
            seen.add((stage, chunk))
        else:
            yield order


def makespan_of_order(durations, intra_order, slice_ms=0.0) -> float:
    """Returns the makespan where the intra stream follows a given static order."""
    chunks = len(durations[0])
    dispatched, inter = [], 0.0
    for c in range(chunks):
        inter += durations[0][c]
        dispatched.append(inter)
    inter += slice_ms
    intra = compute = 0.0
    expert_end, scatter_end = {}, {}
    for stage, c in intra_order:
        ready = dispatched[c] if stage == 1 else expert_end[c]
        intra = max(intra, ready) + durations[stage][c]
        if stage == 1:
            compute = max(compute, intra) + durations[2][c]
            expert_end[c] = compute
        else:
            scatter_end[c] = intra
    for c in range(chunks):
        inter = max(inter, scatter_end[c]) + durations[4][c]
    return inter


def least_exposed_ms(windows, made, alpha, beta) -> float:
    """Returns the least exposed time over all distributions of whole bytes.

    Args:
        windows: [(floors, bases)] of each window.
        made: Bytes that are there once each window is over.
        alpha: Of the AllReduce.
        beta: Of the AllReduce.
    """

    def time(size):
        return alpha + beta * size if size else 0.0

    def exposed(window, size):
        floors, bases = window
        g = time(size)
        return min(max(f, b + g) for f, b in zip(floors, bases, strict=True)) - min(floors)

    def search(index, waiting):
        if index == len(windows):
            return time(waiting)
        return min(
            exposed(windows[index], size) + search(index + 1, waiting - size + made[index])
            for size in range(waiting + 1)
        )

    return search(0, 0) if windows else math.nan
