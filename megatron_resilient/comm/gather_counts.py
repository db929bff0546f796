"""Tells all ranks how much each of them has of what, on the host of every rank."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_resilient.comm.device import device_of


def gather_counts(own: Sequence[int] | torch.Tensor, group: dist.ProcessGroup) -> np.ndarray:
    """Gathers counts. Collective: one all-gather, and one copy to the host.

    Args:
        own: counts of this rank, [n].
        group: between whose ranks.

    Returns:
        [ranks, n], int64.
    """
    counts = torch.as_tensor(own, dtype=torch.int64, device=device_of(group))
    ranks = dist.get_world_size(group)
    gathered = counts.new_empty(ranks * counts.numel())
    if ranks > 1:
        dist.all_gather_into_tensor(gathered, counts, group=group)
    else:
        gathered.copy_(counts)
    table: np.ndarray = gathered.view(ranks, -1).cpu().numpy()
    return table
