"""Carries pieces of state between ranks, as planned by `algorithms.refill_plan`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.refill_plan import Copy, Piece

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
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    sent = 0
    with torch.no_grad():
        remote = []
        for copy in copies:
            if copy.source != copy.target:
                remote.append(copy)
            elif copy.source == rank:
                given, taken = _parts(sources, copy.piece), _parts(targets, copy.piece)
                for kind, target in taken.items():
                    target.copy_(given[kind])
        for turn in _rounds(remote, ranks):
            outgoing: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
            incoming: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
            for copy in turn:
                if copy.source == rank:
                    outgoing[copy.target] += _in_order(_parts(sources, copy.piece))
                if copy.target == rank:
                    incoming[copy.source] += _in_order(_parts(targets, copy.piece))
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


def _parts(store: Store, piece: Piece) -> dict[str, torch.Tensor]:
    """Returns the piece's stretch of every kind, as views."""
    for first, kinds in store[piece.key]:
        length = next(iter(kinds.values())).numel()
        if first <= piece.start and piece.stop <= first + length:
            return {
                kind: tensor.view(-1)[piece.start - first : piece.stop - first]
                for kind, tensor in kinds.items()
            }
    raise KeyError(f"{piece} is not here")


def _in_order(parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [parts[kind] for kind in sorted(parts)]


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
    flat = [t.contiguous().view(torch.uint8).to(device) for tensors in outgoing for t in tensors]
    send = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *flat])
    receive = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    pieces = receive.split([size([t]) for tensors in incoming for t in tensors])
    for tensor, raw in zip((t for tensors in incoming for t in tensors), pieces, strict=True):
        # A copy of its own: raw bytes need not be aligned for the dtype.
        tensor.copy_(raw.clone().view(tensor.dtype))
    return sum(send_sizes)
