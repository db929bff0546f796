"""A global batch on any number of data-parallel ranks: who runs which samples, with what weight.

Microbatch j of a step is the j-th run of `micro` samples of its batch, whichever rank runs it. The
k-th microbatch of rank r is j = k * ranks + r, Megatron's own order. Where the ranks do not divide
the M microbatches, the last ones of some ranks do not exist (j >= M): these are *empty*. They are
run, since the others need their collectives, and have no weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Microbatches:
    """How one step's batch is cut.

    Attributes:
        batch: samples of a step, over all ranks; a multiple of `micro`.
        micro: samples of a microbatch.
        ranks: data-parallel ranks.
        stages: pipeline stages, if their schedule is interleaved.
        group: consecutive microbatches of a virtual stage, if it is; at least `stages`.
    """

    batch: int
    micro: int
    ranks: int
    stages: int = 1
    group: int = 1

    @property
    def real(self) -> int:
        """Microbatches with samples of their own, over all ranks."""
        return self.batch // self.micro

    @property
    def per_rank(self) -> int:
        """Microbatches that every rank runs, empty ones included.

        An interleaved schedule runs at least one group, and a last group no smaller than the
        number of stages.
        """
        least = max(-(-self.real // self.ranks), self.group)
        last = least % self.group
        return least if last == 0 or last >= self.stages else least + self.stages - last

    @property
    def fits(self) -> bool:
        """Whether no microbatch is empty."""
        return self.per_rank * self.ranks == self.real

    @property
    def padded_batch(self) -> int:
        """Samples that are run, those of empty microbatches included."""
        return self.per_rank * self.ranks * self.micro

    @property
    def weight(self) -> float:
        """What a real microbatch weighs where Megatron takes the mean over all that are run."""
        return self.per_rank * self.ranks / self.real

    def is_real(self, rank: int, index: int) -> bool:
        """Tells whether microbatch `index` of `rank` has samples of its own."""
        return index * self.ranks + rank < self.real

    def real_on(self, rank: int) -> int:
        """Returns how many real microbatches a rank runs."""
        return sum(self.is_real(rank, index) for index in range(self.per_rank))

    def samples(self, rank: int, index: int, consumed: int) -> range:
        """Returns the samples of microbatch `index` of `rank`.

        Args:
            rank: data-parallel rank.
            index: from 0, in the order in which the rank runs them.
            consumed: samples of all earlier steps.

        An empty microbatch gets the first samples of its step: the model has to run on something.
        """
        number = index * self.ranks + rank if self.is_real(rank, index) else 0
        first = consumed + number * self.micro
        return range(first, first + self.micro)


@dataclass(frozen=True)
class StepSampler:
    """One rank's batches for a torch DataLoader, step after step.

    Attributes:
        layout: how a step is cut.
        rank: data-parallel rank.
        consumed: samples of the steps that were made before.
        total: samples of the dataset; the last step is the last that is complete.
    """

    layout: Microbatches
    rank: int
    consumed: int
    total: int

    @property
    def _steps(self) -> int:
        return max(0, self.total - self.consumed) // self.layout.batch

    def __len__(self) -> int:
        return self._steps * self.layout.per_rank

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._steps):
            consumed = self.consumed + step * self.layout.batch
            for index in range(self.layout.per_rank):
                yield list(self.layout.samples(self.rank, index, consumed))
