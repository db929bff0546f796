"""The newest durable save of this rank as it still is in host memory (MoC-System, section 5.2).

A restore takes from there what it can: it need not be read, and a snapshot may have experts that
were not written.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_resilient.checkpoint.buffers import Buffer, State
from megatron_resilient.checkpoint.manifest import ArrayInfo, Expert, Stretch, expert_of
from megatron_resilient.checkpoint.snapshot import TORCH_DTYPES


@dataclass(frozen=True)
class InMemory:
    """What a buffer has of a save.

    Attributes:
        buffer: it; others may get it at any time.
        step: of the save.
        files: {path: stretches} of what was written.
    """

    buffer: Buffer
    step: int
    files: Mapping[str, tuple[Stretch, ...]]

    @property
    def is_there(self) -> bool:
        """Whether the buffer still has that save."""
        return self.buffer.state is State.RECOVERY and self.buffer.step == self.step

    def beside(self) -> list[Stretch]:
        """Returns what is in the snapshot but was not written."""
        written = {stretch for stretches in self.files.values() for stretch in stretches}
        return [e.stretch for e in self.buffer.entries if e.stretch not in written]

    def tensors(self, stretches: Collection[Stretch]) -> dict[Stretch, torch.Tensor]:
        """Returns copies of stretches."""
        wanted = set(stretches)
        return {
            entry.stretch: torch.frombuffer(
                bytearray(self.buffer.view(entry)), dtype=TORCH_DTYPES[entry.dtype]
            )
            for entry in self.buffer.entries
            if entry.stretch in wanted
        }


def whole_experts(stretches: Iterable[Stretch], arrays: Mapping[str, ArrayInfo]) -> set[Expert]:
    """Returns the experts of which some stretches together are all there is."""
    held: dict[tuple[str, str], int] = {}
    for each in stretches:  # no two overlap: one rank takes each element
        held[each.key, each.kind] = held.get((each.key, each.kind), 0) + each.size
    whole: dict[Expert, bool] = {}
    for key, info in arrays.items():
        expert = expert_of(key)
        if expert is not None:
            is_here = all(held.get((key, kind)) == info.size for kind in info.kinds)
            whole[expert] = whole.get(expert, True) and is_here
    return {expert for expert, is_here in whole.items() if is_here}
