"""One of Megatron's gradient buckets, reduced range by range."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_resilient.algorithms.gradient_slices import remaining
from megatron_resilient.comm.range_sum import sum_at_owners, sum_everywhere


class SlicedBucket:
    """A bucket of dense gradients, each element of which is scaled and summed once a step.

    Args:
        chunk: Megatron's DistributedDataParallel that the bucket belongs to.
        group: Megatron's bucket group.
        bucket: the bucket.

    Attributes:
        data: the gradients, one dimension; Megatron's own memory.
        sent: ranges (start, stop) that are reduced or just being so, in this step.
        last_sent_bytes: what was sent before the end of the backward pass, in the last step.
    """

    def __init__(self, chunk: nn.Module, group: Any, bucket: Any) -> None:
        self.chunk, self.group = chunk, group
        self.data: torch.Tensor = bucket.grad_data
        self.sent: list[tuple[int, int]] = []
        self.last_sent_bytes = 0
        self._bucket = bucket
        self._norms: list[torch.Tensor] = []
        config = group.ddp_config
        self._average: bool = config.average_in_collective
        self._checked: bool = config.check_for_nan_in_grad or config.check_for_large_grads
        if config.use_distributed_optimizer:
            self._sum, self._ranks = sum_at_owners, group.intra_distributed_optimizer_instance_group
        else:
            self._sum, self._ranks = sum_everywhere, group.data_parallel_group

    def parameters(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        """Gives (start, stop, parameter) in the order of elements; padding belongs to the first."""
        places = sorted(
            ((start, parameter) for parameter, (start, _) in self._bucket.param_to_index.items()),
            key=lambda place: place[0],
        )
        ends = [start for start, _ in places[1:]] + [self.data.numel()]
        for (start, parameter), stop in zip(places, ends, strict=True):
            yield start, stop, parameter

    def reduce(self, start: int, stop: int) -> None:
        """Scales and sums a range, as Megatron does with the whole bucket. Collective; blocks."""
        self.sent.append((start, stop))
        part = self.data[start:stop]
        if self._checked:
            self._norms.append(part.norm(p=2))
        if self._bucket.gradient_scaling_factor != 1.0:
            part *= self._bucket.gradient_scaling_factor
        self._sum(self.data, start, stop, self._ranks, self._average)

    def rest(self) -> list[tuple[int, int]]:
        """Returns the ranges that are not reduced yet, ascending."""
        return remaining(self.data.numel(), self.sent)

    def note_sent(self) -> None:
        """Takes down what has been sent before the end of the backward pass."""
        elements = sum(stop - start for start, stop in self.sent)
        self.last_sent_bytes = elements * self.data.element_size()

    def forget(self) -> None:
        """Makes ready for the next step."""
        self.sent, self._norms = [], []

    def local_norms(self) -> torch.Tensor:
        """Returns norms of this rank's own gradients: of each range sent, and of each other."""
        rest = [self.data[start:stop].norm(p=2) for start, stop in self.rest()]
        return torch.stack([*self._norms, *rest])


def check_local_norms(group: Any, buckets: Sequence[SlicedBucket]) -> None:
    """Has Megatron check the norms of local gradients, as it does before it reduces them.

    Of what is summed already the norms were taken before. The norm of the norms of parts is that of
    the whole, so Megatron's own check is given them in place of the gradients.

    Args:
        group: Megatron's bucket group.
        buckets: its buckets.

    Raises:
        RuntimeError: Megatron's, where it finds NaN, or infinity, twice.
    """
    config = group.ddp_config
    if not (config.check_for_nan_in_grad or config.check_for_large_grads):
        return
    stand_in = SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=bucket.local_norms()) for bucket in buckets]
    )
    type(group).check_grads(
        stand_in,
        check_for_nan_or_inf=config.check_for_nan_in_grad,
        check_for_large=config.check_for_large_grads,
    )
