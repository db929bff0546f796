"""What came of a step, known to every rank when the step commits.

A failure right after the commit must not lose the loss of the step: a rank that held part of it may
be gone. So the losses are summed in the agreement itself.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import mpu

_MOST_LOSSES = 8


@dataclass(frozen=True)
class Outcome:
    """What a committed step gave.

    Attributes:
        losses: by name; empty on ranks before the last pipeline stage.
        skipped: whether the update was left out.
        seconds: from the beginning of the step to its commit.
    """

    losses: dict[str, float]
    skipped: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)

    def as_train_step(self, device: Any) -> tuple:
        """Returns it in the form of Megatron's train_step."""
        losses = {name: torch.tensor(loss, device=device) for name, loss in self.losses.items()}
        return losses, int(self.skipped), False, False, 0, None, None, 0


class StepLosses:
    """Collects the losses of one step's microbatches on this rank."""

    def __init__(self) -> None:
        self._noted: dict[str, list[torch.Tensor]] = {}

    def clear(self) -> None:
        """Starts a step."""
        self._noted = {}

    def note(self, losses: Any) -> None:
        """Takes what Megatron's schedule returned: one dictionary per microbatch, or nothing.

        A value is [sum over tokens, tokens] or a mean, as the user's loss function reports it.
        """
        for each in losses or ():
            for name, value in each.items():
                self._noted.setdefault(name, []).append(value.detach().view(-1))

    def pairs(self) -> list[float]:
        """Returns [sum, weight] of each loss in the order of names, padded to a fixed length."""
        flat = [0.0] * (2 * _MOST_LOSSES)
        if mpu.get_tensor_model_parallel_rank() == 0:  # its peers have the same losses
            for i, name in enumerate(sorted(self._noted)[:_MOST_LOSSES]):
                total = torch.stack(self._noted[name]).sum(dim=0).tolist()
                weight = total[1] if len(total) == 2 else len(self._noted[name])
                flat[2 * i : 2 * i + 2] = [total[0], weight]
        return flat

    def means(self, pairs: Sequence[float]) -> dict[str, float]:
        """Returns the losses from the sum of all ranks' pairs."""
        return {
            name: pairs[2 * i] / pairs[2 * i + 1]
            for i, name in enumerate(sorted(self._noted)[:_MOST_LOSSES])
            if pairs[2 * i + 1]
        }
