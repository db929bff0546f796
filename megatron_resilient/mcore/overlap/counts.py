"""How many rows every rank sends to every slot, on the host of every rank."""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_resilient.comm.gather_counts import gather_counts
from megatron_resilient.mcore.overlap.plan import LayerOverlap


def count_with(dispatcher: MoEAlltoAllTokenDispatcher, overlap: LayerOverlap) -> None:
    """Has a dispatcher count for `overlap` instead of for its own all-to-all."""
    # It is looked at where everything is copied to the host.
    dispatcher.num_global_tokens_per_local_expert = None
    dispatcher.preprocess = partial(_preprocess, dispatcher, overlap)


def _preprocess(
    dispatcher: MoEAlltoAllTokenDispatcher, overlap: LayerOverlap, routing_map_TS: torch.Tensor
) -> torch.Tensor:
    """Takes the place of Megatron's `preprocess`: one all-gather, and one copy to the host.

    Args:
        dispatcher: Megatron's.
        overlap: gets the counts, unless it has those of this microbatch already (replicas).
        routing_map_TS: which token goes to which slot.

    Returns:
        Rows of the local slots, as Megatron's does.
    """
    group = dispatcher.tp_ep_group
    if overlap.rows_DS is None:
        overlap.rows_DS = gather_counts(routing_map_TS.sum(dim=0), group)
    rows_DS = overlap.rows_DS
    dispatcher.num_out_tokens = int(rows_DS[dist.get_rank(group)].sum())
    first, last = dispatcher.local_expert_indices[0], dispatcher.local_expert_indices[-1]
    return torch.from_numpy(rows_DS[:, first : last + 1].sum(axis=0))
