"""Carries pieces of state between ranks, as planned by `algorithms.refill_plan`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.refill_plan import Copy, Piece
from megatron_resilient.comm.device import device_of

# What a rank sends or receives at once beside its state itself.
ROUND_BYTES = 256 << 20

# {kind: flat tensor}: a parameter's fp32 copy and its moments, say. All of one length.
Kinds = Mapping[str, torch.Tensor]
Store = Mapping[str, Sequence[tuple[int, Kinds]]]  # key -> [(first element, tensors)]


def exchange(
    copies: Iterable[Copy], sources: Store, targets: Store, group: dist.ProcessGroup | None = None
) -> int:
    """Carries out planned copies. Collective over `group`.

    Sources and targets must not overlap in memory. Rounds of one all-to-all each.

    Args:
        copies: the plan, the same on every rank; ranks are those of `group`.
        sources: what this rank holds. Every array has the same kinds and dtypes on every rank.
        targets: what this rank is to fill; contiguous.
        group: default: all ranks.

    Returns:
        Bytes that this rank sent to others.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    device = device_of(group)
    sent = 0
    with torch.no_grad():
        remote = []
        for copy in copies:
            if copy.source != copy.target:
                remote.append(copy)
            elif copy.source == rank:
                given, taken = _views(sources, copy.piece), _views(targets, copy.piece)
                whole = torch.cat([_bytes(view) for view in given])
                _write(taken, whole)
        for turn in _rounds(remote, ranks):
            outgoing: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
            incoming: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
            for copy in turn:
                if copy.source == rank:
                    outgoing[copy.target] += _views(sources, copy.piece)
                if copy.target == rank:
                    incoming[copy.source] += _views(targets, copy.piece)
            sent += _exchange(outgoing, incoming, device, group)
    return sent


def _rounds(copies: Sequence[Copy], ranks: int) -> Iterator[list[Copy]]:
    """Cuts a plan so that in a round no rank sends or receives much more than ROUND_BYTES."""
    # An array has at most four kinds of four bytes: weights, fp32 copy and two moments.
    limit = ROUND_BYTES // 16
    turn: list[Copy] = []
    load = [[0] * ranks, [0] * ranks]
    for copy in copies:
        size = copy.piece.size
        if turn and max(load[0][copy.source], load[1][copy.target]) + size > limit:
            yield turn
            turn, load = [], [[0] * ranks, [0] * ranks]
        turn.append(copy)
        load[0][copy.source] += size
        load[1][copy.target] += size
    if turn:
        yield turn


def _views(store: Store, piece: Piece) -> list[torch.Tensor]:
    """Returns the memory of a piece: kind by kind, each from its first element to its last.

    Several stretches may make up the piece; their bytes in this order are the same everywhere.
    """
    covering: list[tuple[int, int, Kinds, int]] = []
    place = piece.start
    while place < piece.stop:
        for first, kinds in store.get(piece.key, ()):
            end = first + next(iter(kinds.values())).numel()
            if first <= place < end:
                covering.append((place, min(end, piece.stop), kinds, first))
                place = min(end, piece.stop)
                break
        else:
            raise KeyError(f"element {place} of {piece} is not here")
    return [
        kinds[kind].view(-1)[start - first : stop - first]
        for kind in sorted(covering[0][2])
        for start, stop, kinds, first in covering
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _write(views: list[torch.Tensor], raw: torch.Tensor) -> None:
    """Fills views, one after the other, from bytes."""
    sizes = [view.numel() * view.element_size() for view in views]
    for view, piece in zip(views, raw.split(sizes), strict=True):
        # A copy of its own: raw bytes need not be aligned for the dtype.
        view.copy_(piece.clone().view(view.dtype))


def _exchange(
    outgoing: list[list[torch.Tensor]],
    incoming: list[list[torch.Tensor]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> int:
    def size(tensors: list[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    send_sizes = [size(tensors) for tensors in outgoing]
    receive_sizes = [size(tensors) for tensors in incoming]
    flat = [_bytes(tensor).to(device) for tensors in outgoing for tensor in tensors]
    send = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *flat])
    receive = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    _write([tensor for tensors in incoming for tensor in tensors], receive)
    return sum(send_sizes)
