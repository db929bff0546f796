"""The collectives of an MoE layer, on rows, with uneven sizes; each blocks until it is done.

On NCCL they are torch.distributed's own. On gloo they are made of sends and receives, because
gloo's own serve slow links badly. Its all-to-all between two ranks runs in one direction at a time:
the notice that a receiver is ready waits behind the data that it sends itself, so here all receives
are posted before the first send. Its reduce-scatter sends every byte twice: here each rank gets the
others' parts and adds them up, in the order of ranks, so that the sum is the same in every run.

All take and return tensors whose first dimension is rows; splits are rows by rank of the group.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class _Piece(NamedTuple):
    peer: int
    tensor: torch.Tensor


def all_to_all(
    x: torch.Tensor,
    send_rows: Sequence[int],
    receive_rows: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Sends each rank its rows. Collective.

    Args:
        x: [sum(send_rows), ...]; rows for rank 0, then for rank 1, ...
        send_rows: rows for each rank.
        receive_rows: rows from each rank.
        group: between whose ranks.

    Returns:
        [sum(receive_rows), ...]: rows from rank 0, then from rank 1, ...
    """
    output = x.new_empty((sum(receive_rows), *x.shape[1:]))
    if dist.get_backend(group) == "nccl":
        dist.all_to_all_single(
            output, x.contiguous(), list(receive_rows), list(send_rows), group=group
        )
        return output
    rank = dist.get_rank(group)
    sent, received = x.contiguous().split(list(send_rows)), output.split(list(receive_rows))
    received[rank].copy_(sent[rank])
    _swap(
        [_Piece(peer, part) for peer, part in enumerate(received) if peer != rank],
        [_Piece(peer, part) for peer, part in enumerate(sent) if peer != rank],
        group,
    )
    return output


def all_gather(x: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gives every rank the rows of all. Collective.

    Args:
        x: [rows[own rank], ...].
        rows: of each rank.
        group: between whose ranks.

    Returns:
        [sum(rows), ...]: those of rank 0, then of rank 1, ...
    """
    output = x.new_empty((sum(rows), *x.shape[1:]))
    received = output.split(list(rows))
    if dist.get_backend(group) == "nccl":
        dist.all_gather(list(received), x.contiguous(), group=group)
        return output
    rank = dist.get_rank(group)
    received[rank].copy_(x)
    peers = [peer for peer in range(len(rows)) if peer != rank]
    _swap(
        [_Piece(peer, received[peer]) for peer in peers],
        [_Piece(peer, received[rank]) for peer in peers],
        group,
    )
    return output


def reduce_scatter(x: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sums the rows that all ranks have for each. Collective.

    Args:
        x: [sum(rows), ...]: rows for rank 0, then for rank 1, ...
        rows: rows for each rank, the same on all ranks.
        group: between whose ranks.

    Returns:
        [rows[own rank], ...]: the sum over ranks. On gloo it is made in their order, in fp32 for
        half-precision rows and then rounded once.
    """
    rank = dist.get_rank(group)
    sent = x.contiguous().split(list(rows))
    if dist.get_backend(group) == "nccl":
        output = torch.empty_like(sent[rank])
        dist.reduce_scatter(output, list(sent), group=group)
        return output
    # The rows of rank r in order of ranks; its own are not copied.
    others = [peer for peer in range(len(rows)) if peer != rank]
    received = {peer: torch.empty_like(sent[rank]) for peer in others}
    _swap(
        [_Piece(peer, received[peer]) for peer in others],
        [_Piece(peer, sent[peer]) for peer in others],
        group,
    )
    return _sum([sent[rank] if peer == rank else received[peer] for peer in range(len(rows))])


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums over ranks; returns the sum, the same bits on every rank of gloo. Collective.

    Args:
        x: any shape.
        group: between whose ranks.
    """
    if dist.get_backend(group) == "nccl":
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total
    ranks = dist.get_world_size(group)
    flat = x.reshape(-1)
    cuts = [k * flat.numel() // ranks for k in range(ranks + 1)]
    rows = [stop - start for start, stop in itertools.pairwise(cuts)]
    return all_gather(reduce_scatter(flat, rows, group), rows, group).view(x.shape)


def _swap(receive: Sequence[_Piece], send: Sequence[_Piece], group: dist.ProcessGroup) -> None:
    """Receives and sends; both sides know the sizes, so what is empty is left out."""
    waits = [
        dist.irecv(_raw(tensor), group=group, group_src=peer)
        for peer, tensor in receive
        if tensor.numel()
    ]
    # Each rank begins with the one after it: else all send to rank 0 first.
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    waits += [
        dist.isend(_raw(tensor), group=group, group_dst=peer)
        for peer, tensor in sorted(send, key=lambda piece: (piece.peer - rank) % ranks)
        if tensor.numel()
    ]
    for wait in waits:
        wait.wait()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    total = first.to(torch.float32) if first.element_size() < 4 else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
