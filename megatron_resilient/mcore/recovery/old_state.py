"""What a process keeps of the world that it left, until a new world has all of it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_resilient.mcore.recovery.arrays import Arrays, Owned, merged, stepped
from megatron_resilient.mcore.recovery.outcome import Outcome
from megatron_resilient.mcore.recovery.progress import Progress


@dataclass
class OldState:
    """The state of one rank at a step, outside Megatron.

    Attributes:
        progress: the position that the tensors belong to.
        owned: what the optimizer steps.
        others: buffers and random streams, of that position.
        ready: the position after the step that was in progress, if all its gradients were ready:
            the step can be completed without the others.
        pending: inner optimizers that have not made that step yet.
        skipped: the update of that step is left out.
        others_ready: buffers and random streams after that step.
        begun: the step after `progress` had begun: nothing is left to do for `progress` itself.
        outcome: what came of the step of `progress`; None before the first step.
        loads: {layer: tokens per expert} of the last plan.
        coordinate: (pipeline, tensor) of the rank.
        extra: what leaving ranks handed over.
        scalars: how the optimizers count their steps; see `scalars`. Known with `arrays`.
        donated: this process gave what only it held to others, and stood by.
    """

    progress: Progress
    owned: list[Owned]
    others: Arrays
    ready: Progress | None
    pending: list[torch.optim.Optimizer]
    skipped: bool
    others_ready: Arrays | None
    begun: bool
    outcome: Outcome | None
    loads: dict[int, list[int]]
    coordinate: tuple[int, int]
    extra: Arrays = field(default_factory=Arrays)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    donated: bool = False
    _frozen: Arrays | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what the others must know to agree on a step."""
        return {
            "step": self.progress.step,
            "ready": self.ready is not None,
            "begun": self.begun,
            "progress": self.progress.to_json(),
            "outcome": self.outcome.to_json() if self.outcome else None,
            "coordinate": list(self.coordinate),
        }

    def complete_step(self) -> None:
        """Makes the step whose gradients were ready: a peer had been told that all agreed. Local.

        Each optimizer steps its own stretch; no gradient is needed from anywhere.
        """
        assert self.ready is not None
        assert self.others_ready is not None
        if not self.skipped:
            for optimizer in self.pending:
                optimizer.step()
        self.progress, self.ready = self.ready, None
        self.others, self.others_ready = self.others_ready, None
        self.begun, self.outcome = False, None

    def arrays(self) -> Arrays:
        """Returns all tensors; the optimizers are let go. The step must have been settled.

        On the host: on a GPU the new model needs the room.
        """
        if self._frozen is None:
            arrays = merged(stepped(self.owned), self.others, self.extra).on_host()
            self.scalars = scalars(self.owned)
            self._frozen = arrays
            self.owned, self.pending = [], []
            self.ready = self.others_ready = None
        return self._frozen

    def inherit(self, heritage: Arrays) -> None:
        """Adds what others handed over."""
        self._frozen = merged(self.arrays(), heritage)


def scalars(owned: list[Owned]) -> dict[str, dict[str, float]]:
    """Returns how the optimizers count their steps, the same for all parameters.

    Returns:
        {"state": numbers that are kept per parameter, "group": numbers kept per parameter group,
        "kinds": {name of each moment: 0}}; empty before the first step.
    """
    for each in owned:
        state = each.optimizer.state.get(each.main)
        if not state:
            continue
        numbers = {
            name: float(value)
            for name, value in state.items()
            if not isinstance(value, torch.Tensor) or not value.dim()
        }
        group = each.optimizer.param_groups[each.group]
        counted = {"step": float(group["step"])} if "step" in group else {}
        kinds = {name: 0.0 for name in each.kinds() if name != "main"}
        return {"state": numbers, "group": counted, "kinds": kinds}
    return {}


def prepare_moments(owned: list[Owned], counts: dict[str, dict[str, float]]) -> None:
    """Makes room for the moments in new optimizers, and has them count on. See `scalars`."""
    if not counts:
        return
    # Torch's optimizers count per parameter, Apex's and Transformer Engine's per group.
    steps = counts["state"].get("step", counts["group"].get("step"))
    for each in owned:
        state = each.optimizer.state[each.main]
        for name in counts["kinds"]:
            if name not in state:
                state[name] = torch.zeros_like(each.main.data, dtype=torch.float32)
        numbers = {name: value for name, value in counts["state"].items() if name != "step"}
        if steps is not None and _counts_per_parameter(each.optimizer):
            numbers["step"] = steps
        for name, value in numbers.items():
            state[name] = torch.tensor(value, dtype=torch.float32)
    for optimizer in {id(each.optimizer): each.optimizer for each in owned}.values():
        if steps is not None and not _counts_per_parameter(optimizer):
            for group in optimizer.param_groups:
                group["step"] = int(steps)


def _counts_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
