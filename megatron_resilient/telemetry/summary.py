"""`summary.json`: what a run came to, made from its events alone."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_resilient.telemetry.atomic import write_text_atomically
from megatron_resilient.telemetry.reader import Event, read_events
from megatron_resilient.telemetry.values import encode, number

SUMMARY_FILE = "summary.json"

MAIN_LOSS = "lm loss"
# The first steps of a job allocate, compile and fill caches; its throughput is measured past them.
WARMUP_STEPS = 3


@dataclass(frozen=True)
class RunSummary:
    """What a run came to; a run that was stopped and resumed in one directory is one run.

    A step that was done again (after a roll-back to a checkpoint) counts once, as it was done
    last; steps that were rolled back and not done again count as not done.

    Attributes:
        losses: Step -> main loss: `lm loss`, or the first one that the step names.
        auxiliary_losses: Name -> step -> loss, of all the others.
        steps: How many steps are done.
        last_step: The last of them; None before the first.
        tokens: Tokens of those steps.
        tokens_per_second: Median over the steps past the first WARMUP_STEPS of each job, or over
            all steps while there are none past them; None without steps.
        recoveries: The `recovery` events, with `total_seconds` over the phases.
        failures: How many `failure` events there were.
        lost_steps: Steps that were done and then rolled back.
        lost_tokens: Tokens of those.
        lost_expert_tokens: Token-expert pairs whose updates were lost because an expert came from
            an older save than the rest.
        checkpoints: The `checkpoint_saved` events.
        errors: The `error` events.
        segments: One entry a job (`run_start`): times, world size, first and last step, exit.
        exit: Of the last job; None while it runs, or if it was killed.
    """

    losses: dict[int, float]
    auxiliary_losses: dict[str, dict[int, float]]
    steps: int
    last_step: int | None
    tokens: int
    tokens_per_second: float | None
    recoveries: list[Event]
    failures: int
    lost_steps: int
    lost_tokens: int
    lost_expert_tokens: int
    checkpoints: list[Event]
    errors: list[Event]
    segments: list[dict[str, Any]]
    exit: str | int | None

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "RunSummary":
        """Returns the summary of `events`, given in the order in which they were written."""
        events = list(events)
        done, rollbacks = replay(events)
        lost = [event for rollback in rollbacks for event in rollback]
        losses: dict[int, float] = {}
        auxiliary: dict[str, dict[int, float]] = {}
        for step, event in sorted(done.items()):
            main = MAIN_LOSS if MAIN_LOSS in event["loss"] else next(iter(event["loss"]), None)
            for name, value in event["loss"].items():
                into = losses if name == main else auxiliary.setdefault(name, {})
                into[step] = number(value)
        exit = None
        for event in events:
            if event["event"] in ("run_start", "run_end"):
                exit = event.get("exit") if event["event"] == "run_end" else None
        return cls(
            losses=losses,
            auxiliary_losses=auxiliary,
            steps=len(done),
            last_step=max(done, default=None),
            tokens=sum(event["tokens"] for event in done.values()),
            tokens_per_second=_tokens_per_second(events),
            recoveries=[
                _body(event) | {"total_seconds": sum(map(number, event["seconds"].values()))}
                for event in events
                if event["event"] == "recovery"
            ],
            failures=sum(event["event"] == "failure" for event in events),
            lost_steps=len(lost),
            lost_tokens=sum(event["tokens"] for event in lost),
            lost_expert_tokens=sum(
                event.get("lost_expert_tokens", 0)
                for event in events
                if event["event"] in ("recovery", "checkpoint_loaded")
            ),
            checkpoints=[_body(event) for event in events if event["event"] == "checkpoint_saved"],
            errors=[_body(event) for event in events if event["event"] == "error"],
            segments=_segments(events),
            exit=exit,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as JSON holds it: steps as text, non-finite numbers as text."""
        record = asdict(self)
        record["losses"] = _text_keys(self.losses)
        record["auxiliary_losses"] = {
            name: _text_keys(losses) for name, losses in self.auxiliary_losses.items()
        }
        return {name: encode(value, name) for name, value in record.items()}


def write_summary(run_dir: str | os.PathLike[str]) -> RunSummary:
    """Makes `run_dir/summary.json` from the events of the run, in one piece.

    Returns:
        The summary.

    Raises:
        TelemetryError: The events cannot be read; an older summary stays as it is.
        OSError: The summary cannot be written; an older one stays as it is.
    """
    summary = RunSummary.from_events(read_events(run_dir))
    text = json.dumps(summary.to_json(), indent=1, allow_nan=False)
    write_text_atomically(Path(run_dir) / SUMMARY_FILE, text + "\n")
    return summary


def replay(events: Iterable[Event]) -> tuple[dict[int, Event], list[list[Event]]]:
    """Follows training through its roll-backs.

    An attempt is what one job does in one generation. Its first step says where it went on from:
    whatever an earlier attempt did from there on is rolled back.

    Returns:
        (step -> the event of each step that is done in the end, and for each roll-back the events
        of the steps that it lost, ascending).
    """
    done: dict[int, Event] = {}
    rollbacks: list[list[Event]] = []
    job, attempt = 0, (0, 0)
    for event in events:
        if event["event"] == "run_start":
            job += 1
        if event["event"] != "step":
            continue
        this = (job, event["generation"])
        if this < attempt:
            continue  # a writer that has not yet noticed that its generation is over
        if this > attempt:
            attempt = this
            # A step that had committed before the failure is told again, not done again.
            again = bool(event.get("replayed"))
            if rolled_back := sorted(step for step in done if step >= event["step"] + again):
                rollbacks.append([done.pop(step) for step in rolled_back])
        if event.get("replayed") and event["step"] in done:
            continue
        done[event["step"]] = event
    return done, rollbacks


def _tokens_per_second(events: list[Event]) -> float | None:
    all_steps, past_warmup = [], []
    steps_of_job = 0
    for event in events:
        if event["event"] == "run_start":
            steps_of_job = 0
        if event["event"] != "step":
            continue
        steps_of_job += 1
        rate = step_tokens_per_second(event)
        if rate is not None:
            all_steps.append(rate)
            if steps_of_job > WARMUP_STEPS:
                past_warmup.append(rate)
    rates = past_warmup or all_steps
    return statistics.median(rates) if rates else None


def step_tokens_per_second(step: Event) -> float | None:
    """Returns the throughput of a `step` event; None if it took no measurable time."""
    if "tokens_per_second" in step:
        return float(step["tokens_per_second"])
    if step["seconds"] <= 0:
        return None
    rate = float(step["tokens"]) / step["seconds"]
    return rate if math.isfinite(rate) else None


def _segments(events: list[Event]) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "run_start":
            segments.append(
                {
                    "start_time": event["time"],
                    "end_time": event["time"],
                    "world_size": event["world_size"],
                    "first_step": None,
                    "last_step": None,
                    "exit": None,
                }
            )
        if not segments:
            continue  # agents and the coordinator may write before the job starts
        segment = segments[-1]
        segment["end_time"] = max(segment["end_time"], event["time"])
        if event["event"] == "step":
            if segment["first_step"] is None:
                segment["first_step"] = event["step"]
            segment["last_step"] = event["step"]
        elif event["event"] == "run_end":
            segment["exit"] = event["exit"]
    return segments


def _body(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "event"}


def _text_keys(values: Mapping[int, float]) -> dict[str, float]:
    return {str(step): value for step, value in values.items()}
