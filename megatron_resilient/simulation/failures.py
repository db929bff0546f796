"""Failures that are drawn: exponential times between them, one node or several at once."""

import heapq
import math

import numpy as np

from megatron_resilient.errors import TraceError
from megatron_resilient.simulation.trace import MOST_NODES, NodeEvent, Trace

# Some minutes of simulation; a month of a thousand nodes has 8,700.
MOST_EVENTS = 1_000_000


def draw_failures(
    nodes: int,
    mtbf_seconds: float,
    seconds: float,
    *,
    seed: int = 0,
    repair_seconds: float | None = None,
    nodes_per_failure: float = 1.0,
) -> Trace:
    """Draws a trace.

    Every node fails at the same rate, such that the cluster, as long as it is whole, has a failure
    every `mtbf_seconds` in the mean. A failure takes as many nodes as a geometric distribution
    says. Each is replaced by another one `repair_seconds` later. O(failures x nodes).

    Args:
        nodes: of the cluster.
        mtbf_seconds: mean time between two failures of the whole cluster; infinite: none.
        seconds: how long.
        seed: the same seed draws the same.
        repair_seconds: until the replacement of a node is there; None: it never is.
        nodes_per_failure: their mean number, at least 1.

    Raises:
        TraceError: numbers that cannot be.
    """
    if nodes > MOST_NODES:
        raise TraceError(f"{nodes:,} nodes: more than {MOST_NODES:,}")
    if nodes < 1 or not mtbf_seconds > 0 or not 0 < seconds < math.inf:
        raise TraceError(
            f"{nodes} nodes that fail every {mtbf_seconds:g} s for {seconds:g} s cannot be"
        )
    if not 1 <= nodes_per_failure < math.inf or not (repair_seconds or 0) >= 0:
        raise TraceError(
            f"{nodes_per_failure:g} nodes a failure, back after {repair_seconds} s, cannot be: "
            "at least 1, and not before the failure"
        )
    draw = np.random.default_rng(seed)
    present = [f"node{number}" for number in range(1, nodes + 1)]
    events = [NodeEvent(0.0, "add", node) for node in present]
    named = nodes
    replacements: list[float] = []
    now = 0.0
    while True:
        # A rate that follows the nodes: without memory, so it may be drawn anew at any time.
        rate = len(present) / nodes / mtbf_seconds
        failure = now + draw.exponential(1 / rate) if rate else math.inf
        arrival = replacements[0] if replacements else math.inf
        now = min(failure, arrival)
        if now >= seconds:
            break
        if len(events) > nodes + MOST_EVENTS:
            raise TraceError(
                f"a failure every {mtbf_seconds / 60:g} minutes for {seconds / 3600:g} hours: more "
                f"than {MOST_EVENTS:,} events; simulate a shorter time, or rarer failures"
            )
        if arrival <= failure:
            heapq.heappop(replacements)
            named += 1
            present.append(f"node{named}")
            events.append(NodeEvent(now, "add", present[-1]))
            continue
        for _ in range(min(int(draw.geometric(1 / nodes_per_failure)), len(present))):
            lost = present.pop(int(draw.integers(len(present))))
            events.append(NodeEvent(now, "remove", lost))
            if repair_seconds is not None:
                heapq.heappush(replacements, now + repair_seconds)
    return Trace.of(
        events, seconds, f"drawn, a failure every {mtbf_seconds / 60:g} minutes, seed {seed}"
    )
