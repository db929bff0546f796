"""Sums a tensor over the replicas of an expert, without a communicator per expert.

Each holder of an expert cuts its tensor into as many shards as there are holders and sends shard k
to holder k, which adds what it gets in the order of ranks and sends the sum back. That is two
all-to-alls on a group that exists anyway, the bytes of a ring all-reduce, for all experts of many
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
        self.group = group
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)
        # Slots of this rank that hold the same expert: the first of them, and the others.
        self.twins: dict[int, list[int]] = {}
        # What this rank sends to each peer in the first exchange (and receives in the second) ...
        self.theirs: list[list[_Piece]] = [[] for _ in range(world)]
        # ... and the shards that it sums, which it receives from each peer in the first.
        self.mine: list[list[_Piece]] = [[] for _ in range(world)]
        # The shards that this rank sums, with the ranks of all holders.
        self.own: dict[_Piece, list[int]] = {}
        self.tensors = 0
        for holding, size in zip(holdings, sizes, strict=True):
            self._plan_unit(holding, size, self.tensors)
            self.tensors += len(holding[self.rank])

    def _plan_unit(self, holding: Holding, size: int, first_tensor: int) -> None:
        for expert in sorted(set(holding[self.rank])):
            slots = [first_tensor + i for i, e in enumerate(holding[self.rank]) if e == expert]
            if len(slots) > 1:
                self.twins[slots[0]] = slots[1:]
            ranks = [rank for rank, slots_ in enumerate(holding) if expert in slots_]
            if len(ranks) == 1:
                continue
            cuts = [k * size // len(ranks) for k in range(len(ranks) + 1)]
            for k, rank in enumerate(ranks):
                piece = _Piece(slots[0], cuts[k], cuts[k + 1])
                if rank != self.rank:
                    self.theirs[rank].append(piece)
                else:
                    self.own[piece] = ranks
                    for peer in ranks:
                        if peer != self.rank:
                            self.mine[peer].append(piece)

    def start(
        self, tensors: Sequence[torch.Tensor], scales: Sequence[float] | None = None
    ) -> "RunningSum":
        """Copies the tensors and starts to sum the copies. Collective, but waits for nobody.

        Args:
            tensors: one contiguous tensor per unit and local slot, units in order; one dtype.
                Half-precision tensors are added in fp32 and rounded once.
            scales: by what each tensor is multiplied before it is summed; default: 1.
        """
        if len(tensors) != self.tensors:
            raise ValueError(f"{len(tensors)} tensors for a plan of {self.tensors}")
        return RunningSum(self, tensors, scales or [1.0] * len(tensors))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces each tensor by the sum over all replicas of its expert. Collective.

        Args:
            tensors: as for `start`.
        """
        running = self.start(tensors)
        running.send_totals()
        running.finish(tensors)


class RunningSum:
    """One sum that is under way: `send_totals`, then `finish`, in one order on all ranks.

    What it sums are copies: the tensors may be changed meanwhile, and are overwritten by `finish`.
    Dropped half way it leaves nothing behind but what the exchange in flight holds.

    Attributes:
        totals_sent: whether `send_totals` has been called.
    """

    def __init__(
        self, plan: ReplicaSum, tensors: Sequence[torch.Tensor], scales: Sequence[float]
    ) -> None:
        self._plan = plan
        self.totals_sent = False
        flat = [tensor.view(-1) for tensor in tensors]
        # Where a rank holds an expert twice: the sum of its tensors.
        self._twins = {first: _times(flat[first], scales[first]).clone() for first in plan.twins}
        for first, total in self._twins.items():
            for other in plan.twins[first]:
                total += _times(flat[other], scales[other])

        def part(piece: _Piece) -> torch.Tensor:
            if piece.tensor in self._twins:
                return self._twins[piece.tensor][piece.start : piece.stop]
            return _times(flat[piece.tensor][piece.start : piece.stop], scales[piece.tensor])

        self._own = {piece: part(piece).clone() for piece in plan.own}
        self._exchange = _Exchange(
            plan.group,
            flat[0].new_empty(0),
            send=[[part(piece) for piece in pieces] for pieces in plan.theirs],
            receive=plan.mine,
        )

    def send_totals(self) -> None:
        """Waits for the peers' shards, adds them up and starts to send the sums. Collective."""
        self.totals_sent = True
        plan, parts = self._plan, [iter(parts) for parts in self._exchange.wait()]
        for piece, ranks in plan.own.items():
            own = self._own[piece]
            addends = [own if rank == plan.rank else next(parts[rank]) for rank in ranks]
            total = addends[0].to(torch.float32) if own.element_size() < 4 else addends[0].clone()
            for addend in addends[1:]:
                total += addend
            self._own[piece] = total.to(own.dtype)
        self._exchange = _Exchange(
            plan.group,
            self._exchange.empty,
            send=[[self._own[piece] for piece in pieces] for pieces in plan.mine],
            receive=plan.theirs,
        )

    def settle(self) -> None:
        """Waits until what is in flight has arrived, and leaves it there for the next call."""
        self._exchange.settle()

    def finish(self, tensors: Sequence[torch.Tensor]) -> None:
        """Waits for the sums and writes them over the tensors."""
        flat = [tensor.view(-1) for tensor in tensors]
        for first, total in self._twins.items():
            flat[first].copy_(total)
        for piece, total in self._own.items():
            flat[piece.tensor][piece.start : piece.stop].copy_(total)
        for pieces, parts in zip(self._plan.theirs, self._exchange.wait(), strict=True):
            for piece, part in zip(pieces, parts, strict=True):
                flat[piece.tensor][piece.start : piece.stop].copy_(part)
        for first, others in self._plan.twins.items():
            for other in others:
                flat[other].copy_(flat[first])


class _Exchange:
    """An all-to-all in flight, and what it sends: kept until it has arrived.

    Args:
        group: between whose ranks.
        empty: an empty tensor of the kind that is sent.
        send: what goes to each peer.
        receive: what comes from each peer, by its sizes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        empty: torch.Tensor,
        send: Sequence[Sequence[torch.Tensor]],
        receive: Sequence[Sequence[_Piece]],
    ) -> None:
        self.empty = empty
        self._sizes = [[piece.size for piece in pieces] for pieces in receive]
        to_receive = [sum(sizes) for sizes in self._sizes]
        to_send = [sum(part.numel() for part in parts) for parts in send]
        self._outgoing = torch.cat([empty, *(part for parts in send for part in parts)])
        self._incoming = empty.new_empty(sum(to_receive))
        self._work: dist.Work | None = dist.all_to_all_single(
            self._incoming, self._outgoing, to_receive, to_send, group=group, async_op=True
        )

    def settle(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def wait(self) -> list[tuple[torch.Tensor, ...]]:
        """Returns what came from each peer, part by part."""
        self.settle()
        incoming = self._incoming.split([sum(sizes) for sizes in self._sizes])
        return [part.split(sizes) for part, sizes in zip(incoming, self._sizes, strict=True)]


def _times(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1 else tensor * scale
