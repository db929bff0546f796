"""Moves experts between ranks: whoever holds an expert gives it to whoever should hold it.

A holding says which logical experts each rank has, slot by slot: `holding[rank][slot]`. Every rank
knows both holdings, so the plan needs no communication and is the same everywhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Holding = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Fetch:
    """One copy of an expert: from a slot of a rank into a slot of a rank, perhaps the same one."""

    expert: int
    source: tuple[int, int]
    target: tuple[int, int]


def keep_places(held: Holding, wanted: Holding) -> list[list[int]]:
    """Orders each rank's wanted experts so that those it has already stay in their slots.

    Args:
        held: experts by rank and slot before; distinct on each rank.
        wanted: experts of each rank after; as many as before.
    """
    placed = []
    for before, after in zip(held, wanted, strict=True):
        coming = iter([expert for expert in after if expert not in before])
        placed.append([expert if expert in after else next(coming) for expert in before])
    return placed


def plan_fetches(
    held: Holding, wanted: Holding, sources: Mapping[tuple[int, int], int] | None = None
) -> list[Fetch]:
    """Decides where each wanted slot gets its expert from.

    A rank that has the expert copies its own; else it comes from the given source, or from the
    holder with the fewest fetches so far, ties by rank. O(slots x holders).

    Args:
        held: experts by rank and slot before.
        wanted: experts by rank and slot after; the same number of ranks, any number of slots.
        sources: {(expert, rank that needs it): rank that sends it}.

    Raises:
        KeyError: a wanted expert is held nowhere.
    """
    holders: dict[int, dict[int, int]] = {}
    for rank, slots in enumerate(held):
        for slot, expert in enumerate(slots):
            holders.setdefault(expert, {}).setdefault(rank, slot)
    given: Counter[int] = Counter()
    fetches = []
    for rank, slots in enumerate(wanted):
        for slot, expert in enumerate(slots):
            having = holders[expert]
            if rank in having:
                source = rank
            elif sources is not None:
                source = sources[expert, rank]
            else:
                source = min(having, key=lambda candidate: (given[candidate], candidate))
                given[source] += 1
            fetches.append(Fetch(expert, (source, having[source]), (rank, slot)))
    return fetches


@dataclass(frozen=True)
class Received:
    """What a rank got and has not put in place yet.

    Attributes:
        pieces: (the fetch, its kind of tensor, what came), for all fetches to this rank.
        sent_bytes: what this rank sent to others.
    """

    pieces: list[tuple[Fetch, int, torch.Tensor]]
    sent_bytes: int

    def put(self, targets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Writes it into the slots wanted. Local."""
        with torch.no_grad():
            for fetch, kind, piece in self.pieces:
                target = targets[kind][fetch.target[1]]
                target.copy_(piece.view_as(target))


def receive(
    fetches: Sequence[Fetch],
    sources: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
) -> Received:
    """Sends and receives all that a plan moves, and writes nothing yet. Collective over `group`.

    One all-to-all per dtype.

    Args:
        fetches: the plan, the same on every rank; ranks are those of `group`.
        sources: for each kind of tensor (fc1 weight, its first moment, ...) one tensor per slot
            held before. All slots of a kind have one shape and dtype, the same on every rank.
        targets: the same for the slots wanted; the same kinds in the same order.
        group: the ranks of the holdings.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sent_bytes = 0
    received: list[tuple[Fetch, int, torch.Tensor]] = []
    by_dtype: dict[torch.dtype, list[int]] = {}
    for kind, tensors in enumerate(targets):
        by_dtype.setdefault(tensors[0].dtype, []).append(kind)
    with torch.no_grad():
        for kinds in by_dtype.values():
            outgoing: list[list[torch.Tensor]] = [[] for _ in range(world)]
            incoming: list[list[torch.Tensor]] = [[] for _ in range(world)]
            names: list[list[tuple[Fetch, int]]] = [[] for _ in range(world)]
            for fetch in fetches:
                (giver, source), (taker, target) = fetch.source, fetch.target
                if giver == rank:
                    outgoing[taker] += [sources[kind][source].reshape(-1) for kind in kinds]
                if taker == rank:
                    incoming[giver] += [targets[kind][target] for kind in kinds]
                    names[giver] += [(fetch, kind) for kind in kinds]
            sent, flats = _exchange(outgoing, incoming, group)
            sent_bytes += sent
            for named, tensors, flat in zip(names, incoming, flats, strict=True):
                pieces = flat.split([tensor.numel() for tensor in tensors])
                received += [(*name, piece) for name, piece in zip(named, pieces, strict=True)]
    return Received(received, sent_bytes)


def transfer(
    fetches: Sequence[Fetch],
    sources: Sequence[Sequence[torch.Tensor]],
    targets: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
) -> int:
    """Carries out a plan for all tensors of all experts; arguments as for `receive`.

    All sources are read before a target is written, so the two may be the same memory.

    Returns:
        Bytes that this rank sent to others.
    """
    received = receive(fetches, sources, targets, group)
    received.put(targets)
    return received.sent_bytes


def _exchange(
    outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]], group: dist.ProcessGroup
) -> tuple[int, list[torch.Tensor]]:
    rank = dist.get_rank(group)
    example = next((t for tensors in (*incoming, *outgoing) for t in tensors), None)
    if example is None:
        example = torch.empty(0)
    send_sizes = [sum(t.numel() for t in tensors) for tensors in outgoing]
    receive_sizes = [sum(t.numel() for t in tensors) for tensors in incoming]
    empty = example.new_empty(0)
    send = torch.cat([empty, *(t for tensors in outgoing for t in tensors)])
    receive = example.new_empty(sum(receive_sizes))
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    sent = sum(size for peer, size in enumerate(send_sizes) if peer != rank)
    return sent * example.element_size(), list(receive.split(receive_sizes))
