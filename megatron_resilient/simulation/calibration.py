"""Costs of a run of ours, from what it wrote about itself."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from megatron_resilient.errors import ConfigError
from megatron_resilient.simulation.costs import Costs, SaveCost
from megatron_resilient.telemetry import read_events

# The first steps of a job, or after a recovery, warm up.
_WARM_UP = 3


def costs_of_run(run_dir: str | PathLike[str], ranks_per_node: int = 1) -> Costs:
    """Returns the costs that a run of ours measured.

    Step times are those of our runs, by their number of nodes: loads, replicas and what being
    recoverable costs are in them, so `expert_share` and `resilience_overhead` are 0. Recoveries and
    joins are means: what a failure costs in the long run. Of saves the medians; those of partial
    and full ones are not told apart. What the run did not do keeps its default.

    Args:
        run_dir: the folder with its events.
        ranks_per_node: of the run.

    Raises:
        TelemetryError: no events there, or damaged ones.
        ConfigError: the run has too few steps, or worlds without whole nodes.
    """
    events = read_events(run_dir)
    try:
        steps = _step_seconds(events, ranks_per_node)
    except ConfigError as error:
        raise ConfigError(f"{run_dir}: {error}") from None
    if not steps:
        raise ConfigError(
            f"{run_dir}: no job of this run did more than {_WARM_UP} steps: let it train for longer"
        )
    nodes = max(steps)
    step = steps[nodes]
    found = replace(
        Costs(),
        step_seconds=step,
        relative_steps={str(number): seconds / step for number, seconds in steps.items()},
        expert_share=0.0,
        resilience_overhead=0.0,
        source=f"the run in {run_dir}",
    )
    recoveries = [event for event in events if event["event"] == "recovery"]
    lost = _mean_recovery((e for e in recoveries if e.get("lost_nodes")), steps)
    joined = _mean_recovery((e for e in recoveries if not e.get("lost_nodes")), steps)
    if lost is not None:
        # State that was copied is in the phases.
        found = replace(found, recovery_seconds=lost, join_seconds=lost, refill_seconds_per_gib=0.0)
    if joined is not None:
        found = replace(found, join_seconds=joined)
    saves = [event for event in events if event["event"] == "checkpoint_saved"]
    if saves:
        stall = statistics.median(save["stall_seconds"] for save in saves)
        whole = statistics.median(save["seconds"] for save in saves)
        save = SaveCost(stall_seconds=stall, persist_seconds=max(0.0, whole - stall))
        found = replace(found, our_save=save)
    return found


def _step_seconds(events: Sequence[Mapping[str, Any]], ranks_per_node: int) -> dict[int, float]:
    """Returns the median seconds of a step by number of nodes."""
    seconds: dict[int, list[float]] = {}
    nodes, warm_up = 0, 0
    for event in events:
        if event["event"] in ("run_start", "recovery") and "world_size" in event:
            nodes, rest = divmod(event["world_size"], ranks_per_node)
            if rest or not nodes:
                raise ConfigError(
                    f"a world of {event['world_size']} ranks is no whole number of nodes with "
                    f"{ranks_per_node} each: give the run's own --ranks-per-node"
                )
            warm_up = _WARM_UP
        elif event["event"] == "step" and not event.get("replayed"):
            if warm_up:
                warm_up -= 1
            elif nodes:
                seconds.setdefault(nodes, []).append(event["seconds"])
    return {number: statistics.median(own) for number, own in seconds.items()}


def _mean_recovery(
    recoveries: Iterable[Mapping[str, Any]], steps: Mapping[int, float]
) -> float | None:
    """Returns the mean time to the first step; that step counts as one that was trained."""
    usual = statistics.median(steps.values())
    each = [
        sum(event["seconds"].values()) - min(usual, event["seconds"].get("first_step", 0.0))
        for event in recoveries
    ]
    return statistics.fmean(each) if each else None
