"""Sums a tensor over the replicas of an expert, without a communicator per expert.

Each holder of an expert cuts its tensor into as many shards as there are holders and sends shard k
to holder k, which adds what it gets in the order of ranks and sends the sum back. That is two
all-to-alls on a group that exists anyway, the bytes of a ring all-reduce, for all experts of all
layers at once; and every replica ends with the same bits, because each sum is made in one place.

Lazarus (arXiv 2407.04656, section 5) builds a communicator per set of holders instead, which has
to be made anew whenever the placement changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_resilient.comm.transfer import Holding


@dataclass(frozen=True)
class _Piece:
    """A stretch of one local tensor: `tensor[start:stop]` of its flat view."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class ReplicaSum:
    """Sums tensors over replicas, again and again for one placement.

    Args:
        holdings: for each unit (a layer's fc1 weights, its fc2 weights, ...) the logical expert of
            each slot, `holding[rank][slot]`, ranks as in `group`.
        sizes: elements of one expert's tensor, for each unit.
        group: the ranks of the holdings.

    Building it is O(slots x holders), without communication; it is the same plan on every rank.
    """

    def __init__(
        self, holdings: Sequence[Holding], sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._group = group
        self._rank, world = dist.get_rank(group), dist.get_world_size(group)
        self._twins: list[tuple[int, list[int]]] = []
        # What this rank sends to each peer in the first exchange (and receives in the second) ...
        self._theirs: list[list[_Piece]] = [[] for _ in range(world)]
        # ... and the shards that it sums, which it receives from each peer in the first.
        self._mine: list[list[_Piece]] = [[] for _ in range(world)]
        self._own: list[tuple[_Piece, list[int]]] = []
        first_tensor = 0
        for holding, size in zip(holdings, sizes, strict=True):
            self._plan_unit(holding, size, first_tensor)
            first_tensor += len(holding[self._rank])
        self._tensors = first_tensor

    def _plan_unit(self, holding: Holding, size: int, first_tensor: int) -> None:
        for expert in sorted(set(holding[self._rank])):
            slots = [first_tensor + i for i, e in enumerate(holding[self._rank]) if e == expert]
            if len(slots) > 1:
                self._twins.append((slots[0], slots[1:]))
            ranks = [rank for rank, slots_ in enumerate(holding) if expert in slots_]
            if len(ranks) == 1:
                continue
            cuts = [k * size // len(ranks) for k in range(len(ranks) + 1)]
            for k, rank in enumerate(ranks):
                piece = _Piece(slots[0], cuts[k], cuts[k + 1])
                if rank != self._rank:
                    self._theirs[rank].append(piece)
                else:
                    self._own.append((piece, ranks))
                    for peer in ranks:
                        if peer != self._rank:
                            self._mine[peer].append(piece)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by the sum over all replicas of its expert. Collective.

        Args:
            tensors: one contiguous tensor per unit and local slot, units in order; one dtype.
                Half-precision tensors are added in fp32 and rounded once.
        """
        if len(tensors) != self._tensors:
            raise ValueError(f"{len(tensors)} tensors for a plan of {self._tensors}")
        if not tensors:
            return
        flat = [tensor.view(-1) for tensor in tensors]
        for first, others in self._twins:
            for other in others:
                flat[first] += flat[other]
        received = self._exchange(flat, send=self._theirs, receive=self._mine)
        self._add(flat, received)
        totals = self._exchange(flat, send=self._mine, receive=self._theirs)
        for peer, pieces in enumerate(self._theirs):
            parts = totals[peer].split([piece.size for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                flat[piece.tensor][piece.start : piece.stop].copy_(part)
        for first, others in self._twins:
            for other in others:
                flat[other].copy_(flat[first])

    def _exchange(
        self,
        flat: list[torch.Tensor],
        send: list[list[_Piece]],
        receive: list[list[_Piece]],
    ) -> list[torch.Tensor]:
        send_sizes = [sum(piece.size for piece in pieces) for pieces in send]
        receive_sizes = [sum(piece.size for piece in pieces) for pieces in receive]
        outgoing = torch.cat(
            [
                flat[0].new_empty(0),
                *(flat[p.tensor][p.start : p.stop] for pieces in send for p in pieces),
            ]
        )
        incoming = flat[0].new_empty(sum(receive_sizes))
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self._group)
        return list(incoming.split(receive_sizes))

    def _add(self, flat: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """Adds up this rank's shards, for each one over the holders in the order of ranks."""
        parts = {
            peer: iter(received[peer].split([piece.size for piece in pieces]))
            for peer, pieces in enumerate(self._mine)
        }
        for piece, ranks in self._own:
            own = flat[piece.tensor][piece.start : piece.stop]
            addends = [own if rank == self._rank else next(parts[rank]) for rank in ranks]
            total = addends[0].to(torch.float32) if own.element_size() < 4 else addends[0].clone()
            for addend in addends[1:]:
                total += addend
            own.copy_(total)
