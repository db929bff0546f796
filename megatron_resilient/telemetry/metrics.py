"""Numbers of a run for a monitoring system, made from its events alone."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_resilient.telemetry.reader import Event
from megatron_resilient.telemetry.values import number

PREFIX = "megatron_resilient_"
# In the path of a save: ours, and Megatron's.
_STEP_OF_SAVE = re.compile(r"(?:step|iter)_0*([0-9]+)[^/]*/?$")


@dataclass
class Metric:
    """One number, or one for each value of a label.

    Attributes:
        name: without `PREFIX`; that of a counter ends in `_total`.
        meaning: what it says, with its unit.
        label: its label; empty: none.
        values: by the label's value; by "" without a label.
    """

    name: str
    meaning: str
    label: str = ""
    values: dict[str, float] = field(default_factory=dict)

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, over all jobs of the run."""
        return self.name.endswith("_total")

    def set(self, value: Any, of: object = "") -> None:
        """Takes a new value; None is none."""
        if value is not None:
            self.values[str(of)] = number(value)

    def add(self, value: Any = 1, of: object = "") -> None:
        """Adds to a counter; None adds nothing."""
        if value is not None:
            self.values[str(of)] = self.values.get(str(of), 0.0) + number(value)


_METRICS: Mapping[str, tuple[str, str]] = {
    "step": ("last training step that is done", ""),
    "loss": ("losses of the last step", "loss"),
    "evaluation_loss": ("losses of the last evaluation", "loss"),
    "step_seconds": ("duration of the last step", ""),
    "tokens_per_second": ("tokens per second of the whole job, last step", ""),
    "grad_norm": ("norm of the gradients before clipping, last step", ""),
    "learning_rate": ("learning rate of the last step", ""),
    "world_size": ("ranks", ""),
    "nodes": ("members of an elastic job", ""),
    "generation": ("how many times the set of members has changed", ""),
    "last_event_timestamp_seconds": ("time of the newest event, since 1970", ""),
    "expert_load_imbalance": ("largest over mean tokens of a layer's experts", "layer"),
    "rank_load_imbalance": ("largest over mean tokens of a layer's ranks", "layer"),
    "recovery_seconds": ("duration of the last recovery, by phase", "phase"),
    "checkpoint_step": ("step of the newest complete save", ""),
    "checkpoint_seconds": ("from the start of the last save to its end", ""),
    "overlap_degree": ("chunks of a layer's pass", "pass"),
    "tokens_total": ("tokens trained on, steps that were done twice counted twice", ""),
    "steps_total": ("steps done, those that were done twice counted twice", ""),
    "failures_total": ("failures of members", ""),
    "recoveries_total": ("recoveries, by where state came from", "source"),
    "recovery_seconds_total": ("duration of all recoveries", ""),
    "lost_steps_total": ("steps that had to be done again", ""),
    "lost_expert_tokens_total": ("token-expert pairs whose updates were lost", ""),
    "checkpoints_total": ("complete saves", ""),
    "checkpoint_bytes_total": ("bytes of complete saves", ""),
    "checkpoint_stall_seconds_total": ("how long training waited for saves", ""),
    "checkpoints_failed_total": ("saves that were given up", ""),
    "rebalances_total": ("times that experts were moved", ""),
    "stragglers_total": ("slow nodes that were noticed, by node", "member"),
    "errors_total": ("errors", ""),
}


class RunMetrics:
    """The metrics of one run."""

    def __init__(self) -> None:
        """Has none yet: a metric is there from the first event on that says it."""
        self._metrics = {
            name: Metric(name, meaning, label) for name, (meaning, label) in _METRICS.items()
        }

    def __iter__(self) -> Iterator[Metric]:
        """Gives the metrics that have a value."""
        return (metric for metric in self._metrics.values() if metric.values)

    def take(self, event: Event) -> None:
        """Takes an event into account, in the order of the file. O(size of the event)."""
        m = self._metrics
        m["last_event_timestamp_seconds"].set(event["time"])
        m["generation"].set(event["generation"])
        follow = _FOLLOW.get(event["event"])
        if follow is not None:
            follow(m, event)


def _run_start(m: Mapping[str, Metric], event: Event) -> None:
    m["world_size"].set(event["world_size"])


def _step(m: Mapping[str, Metric], event: Event) -> None:
    m["step"].set(event["step"])
    for name, loss in event["loss"].items():
        m["loss"].set(loss, name)
    m["step_seconds"].set(event["seconds"])
    seconds = number(event["seconds"])
    speed = event["tokens"] / seconds if seconds else None
    m["tokens_per_second"].set(event.get("tokens_per_second", speed))
    m["grad_norm"].set(event.get("grad_norm"))
    m["learning_rate"].set(event.get("learning_rate"))
    m["tokens_total"].add(event["tokens"])
    m["steps_total"].add()


def _expert_load(m: Mapping[str, Metric], event: Event) -> None:
    for name, field_name in (("expert", "tokens"), ("rank", "rank_tokens")):
        tokens = event.get(field_name)
        if tokens and sum(tokens):
            imbalance = max(tokens) * len(tokens) / sum(tokens)
            m[f"{name}_load_imbalance"].set(imbalance, event["layer"])


def _saved(m: Mapping[str, Metric], event: Event) -> None:
    # Written when the save is complete: some steps after the one that it is of.
    of = _STEP_OF_SAVE.search(event["path"])
    m["checkpoint_step"].set(int(of[1]) if of else event["step"])
    m["checkpoint_seconds"].set(event["seconds"])
    m["checkpoints_total"].add()
    m["checkpoint_bytes_total"].add(event.get("bytes"))
    m["checkpoint_stall_seconds_total"].add(event["stall_seconds"])


def _recovery(m: Mapping[str, Metric], event: Event) -> None:
    m["recoveries_total"].add(of=event.get("source", "unknown"))
    m["recovery_seconds"].values.clear()
    for phase, seconds in event["seconds"].items():
        m["recovery_seconds"].set(seconds, phase)
        m["recovery_seconds_total"].add(seconds)
    m["world_size"].set(event.get("world_size"))
    m["lost_steps_total"].add(event.get("lost_steps"))
    m["lost_expert_tokens_total"].add(event.get("lost_expert_tokens"))


def _evaluation(m: Mapping[str, Metric], event: Event) -> None:
    for name, loss in event["loss"].items():
        m["evaluation_loss"].set(loss, name)


def _schedule(m: Mapping[str, Metric], event: Event) -> None:
    m["overlap_degree"].set(event["degree"], f"{event['layer']} {event['phase']}")


_FOLLOW: Mapping[str, Callable[[Mapping[str, Metric], Event], None]] = {
    "run_start": _run_start,
    "step": _step,
    "expert_load": _expert_load,
    "checkpoint_saved": _saved,
    "checkpoint_failed": lambda m, event: m["checkpoints_failed_total"].add(),
    "checkpoint_loaded": lambda m, event: m["lost_expert_tokens_total"].add(
        event.get("lost_expert_tokens")
    ),
    "failure": lambda m, event: m["failures_total"].add(),
    "recovery": _recovery,
    "member_join": lambda m, event: m["nodes"].set(event.get("members")),
    "member_leave": lambda m, event: m["nodes"].set(event.get("members")),
    "straggler": lambda m, event: m["stragglers_total"].add(of=event["member"]),
    "rebalance": lambda m, event: m["rebalances_total"].add(),
    "schedule": _schedule,
    "evaluation": _evaluation,
    "error": lambda m, event: m["errors_total"].add(),
}
