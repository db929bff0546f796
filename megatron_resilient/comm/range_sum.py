"""Sums a range of a buffer over ranks, in place: what a data-parallel reduction is made of."""

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.gradient_slices import rows_by_owner
from megatron_resilient.comm import exchange


def sum_everywhere(
    buffer: torch.Tensor, start: int, stop: int, group: dist.ProcessGroup, average: bool = False
) -> None:
    """Replaces `buffer[start:stop]` by its sum over ranks, on all of them. Collective; blocks.

    Args:
        buffer: one dimension, contiguous.
        start: first element.
        stop: element after the last one.
        group: between whose ranks.
        average: whether to divide by their number.
    """
    part = buffer[start:stop]
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(part, op=_operation(average), group=group)
        return
    part.copy_(exchange.all_reduce(part, group))
    if average:
        part /= dist.get_world_size(group)


def sum_at_owners(
    buffer: torch.Tensor, start: int, stop: int, group: dist.ProcessGroup, average: bool = False
) -> None:
    """Replaces the part of `buffer[start:stop]` that this rank keeps by its sum over ranks.

    Rank r of R keeps the r-th of R equal shards of the buffer. What others keep is left as it is.
    A range that one rank keeps goes to that rank alone, so the bytes are those of a reduce-scatter.
    Collective; blocks.

    Args:
        buffer: one dimension, contiguous; the ranks divide its length.
        start: first element.
        stop: element after the last one.
        group: between whose ranks.
        average: whether to divide by their number.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shard = buffer.numel() // ranks
    rows = rows_by_owner(start, stop, shard, ranks)
    first = max(start, rank * shard)
    own = buffer[first : first + rows[rank]]
    if dist.get_backend(group) == "nccl":
        parts = list(buffer[start:stop].split(rows))
        total = torch.empty_like(own)
        dist.reduce_scatter(total, parts, op=_operation(average), group=group)
        own.copy_(total)
        return
    own.copy_(exchange.reduce_scatter(buffer[start:stop], rows, group))
    if average:
        own /= ranks


def _operation(average: bool) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
