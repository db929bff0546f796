"""What the demo proves, from the events of its run alone."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from statistics import fmean
from typing import Self

from megatron_resilient.telemetry import Event, RunSummary
from megatron_resilient.telemetry.summary import MAIN_LOSS

END_STEPS = 10  # the loss at the end is the mean over the last of these


@dataclass(frozen=True)
class Repeated:
    """The steps that both jobs did: those that the first had lost by being killed.

    Attributes:
        steps: their numbers, ascending.
        different: those whose losses, in training or validation, gradient norm or learning rate are
            not the same in every bit.
    """

    steps: tuple[int, ...]
    different: tuple[int, ...]

    @classmethod
    def of(cls, events: Sequence[Event]) -> Self:
        """Compares the first two jobs of a run.

        JSON holds a float with as many digits as it takes to get the same bits back.
        """
        jobs: list[dict[int, list]] = []
        for event in events:
            if event["event"] == "run_start":
                jobs.append(defaultdict(list))
            elif event["event"] in ("step", "evaluation"):
                numbers = [event.get(name) for name in ("loss", "grad_norm", "learning_rate")]
                jobs[-1][event["step"]].append(numbers)
        first, second = [*jobs, {}][:2]
        steps = sorted(first.keys() & second.keys())
        return cls(tuple(steps), tuple(step for step in steps if first[step] != second[step]))

    @property
    def exact(self) -> bool:
        """Whether there is something to compare, and no difference."""
        return bool(self.steps) and not self.different

    def __str__(self) -> str:
        if not self.steps:
            return "unknown: no step was done twice"
        span = f"steps {self.steps[0]} to {self.steps[-1]} were done twice"
        if self.exact:
            return f"yes: {span}, with the same loss and gradient norm in every bit"
        return f"NO: {span}, and these differ: {', '.join(map(str, self.different))}"


@dataclass(frozen=True)
class Balance:
    """How evenly the tokens were spread over the ranks, max / mean, mean over layers and time.

    Attributes:
        with_replicas: as they were computed.
        without: as they would have been with each expert on one rank, as in stock Megatron.
    """

    with_replicas: float
    without: float

    @classmethod
    def of(cls, events: Sequence[Event]) -> Self:
        """Reads the expert loads of a run; at least one must have `rank_tokens`."""
        loads = [event for event in events if "rank_tokens" in event]
        return cls(
            fmean(_imbalance(event["rank_tokens"]) for event in loads),
            fmean(
                _imbalance([sum(own) for own in batched(event["tokens"], _experts_a_rank(event))])
                for event in loads
            ),
        )

    def __str__(self) -> str:
        same = "without replicas, from the same routing:"
        return f"{self.with_replicas:.2f} ({same} {self.without:.2f})"


def recovery_line(event: Event) -> str:
    """Says in one line how training went on after a loss or with a node that came back."""
    nodes = [f"without {node}" for node in event["lost_nodes"]]
    nodes += [f"with {node} again" for node in event["joined_nodes"]]
    return (
        f"{' and '.join(nodes)}: {event['world_size']} nodes go on after "
        f"{sum(event['seconds'].values()):.1f} s, state from {event['source']}, "
        f"{event['lost_steps']} steps lost"
    )


def loaded_line(event: Event) -> str:
    """Says in one line what was loaded, and what was lost with it."""
    line = f"{Path(event['path']).stem} loaded in {event['seconds']:.1f} s"
    for layer, expert, step, older in event["replaced_experts"]:
        line += (
            f"; expert {expert} of layer {layer} of step {step} is damaged: that of step {older} "
            "is taken"
        )
    if event["lost_expert_tokens"]:
        line += (
            f"; updates of {event['lost_expert_tokens']:,} token-expert pairs lost "
            f"({event['lost_share']:.2%} of the training)"
        )
    return line


def _experts_a_rank(event: Event) -> int:
    return -(-len(event["tokens"]) // len(event["rank_tokens"]))


def _imbalance(tokens: Sequence[int]) -> float:
    return max(tokens) * len(tokens) / (sum(tokens) or 1)


@dataclass(frozen=True)
class Result:
    """What the run came to.

    Attributes:
        training_loss: of the first step, and the mean over the last END_STEPS.
        validation_loss: step -> loss of each evaluation.
        tokens_per_second: median.
        balance: see there.
        recoveries: the events of the node that was killed and came back.
        repeated: see there.
        loaded: the events of the checkpoints that jobs began from.
    """

    training_loss: tuple[float, float]
    validation_loss: dict[int, float]
    tokens_per_second: float
    balance: Balance
    recoveries: tuple[Event, ...]
    repeated: Repeated
    loaded: tuple[Event, ...]

    @classmethod
    def of(cls, events: Sequence[Event]) -> Self:
        """Reads the events of a run that has ended."""
        summary = RunSummary.from_events(events)
        losses = list(summary.losses.values())
        last = losses[-END_STEPS:]
        return cls(
            training_loss=(losses[0], sum(last) / len(last)),
            validation_loss={
                event["step"]: event["loss"][MAIN_LOSS]
                for event in events
                if event["event"] == "evaluation"
            },
            tokens_per_second=summary.tokens_per_second or 0.0,
            balance=Balance.of(events),
            recoveries=tuple(event for event in events if event["event"] == "recovery"),
            repeated=Repeated.of(events),
            loaded=tuple(event for event in events if event["event"] == "checkpoint_loaded"),
        )

    @property
    def good(self) -> bool:
        """Whether no step was lost, the resume was exact, damage was found, and the loss fell."""
        start, end = self.training_loss
        return self.survived and self.repeated.exact and self.found_damage and end < start

    @property
    def found_damage(self) -> bool:
        """Whether the last job replaced the one expert that was damaged."""
        return bool(self.loaded) and len(self.loaded[-1]["replaced_experts"]) == 1

    @property
    def survived(self) -> bool:
        """Whether a node was lost and came back, from memory and without a lost step."""
        causes = [event["cause"] for event in self.recoveries]
        costless = all(
            event["source"] == "memory" and event["lost_steps"] == 0 for event in self.recoveries
        )
        return costless and causes == ["failure", "join"]

    def rows(self) -> list[tuple[str, str]]:
        """Returns (name, value) for people."""
        start, end = self.training_loss
        first, last = min(self.validation_loss), max(self.validation_loss)
        change = f"{end / start - 1:+.0%}"
        return [
            ("training loss", f"{start:.2f} at step 1, {end:.2f} at the end ({change})"),
            (
                "validation loss",
                f"{self.validation_loss[first]:.2f} after step {first}, "
                f"{self.validation_loss[last]:.2f} after step {last}",
            ),
            ("tokens/s", f"{self.tokens_per_second:,.0f} (median over steps)"),
            ("max / mean tokens per rank", str(self.balance)),
            *((f"after step {event['step']}", recovery_line(event)) for event in self.recoveries),
            ("resume exact", str(self.repeated)),
            ("after damage", loaded_line(self.loaded[-1]) if self.loaded else "not tried"),
        ]
