"""Checks that the replicas of an expert are equal bit by bit."""

import torch
import torch.distributed as dist

from megatron_resilient.errors import ReplicaMismatchError
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(layers: list[ReplicatedMoELayer]) -> None:
    """Compares digests of all slots over the ranks that hold them.

    Collective over the layers' expert-parallel group; one all-gather of one integer per slot.

    Raises:
        ReplicaMismatchError: names layer, expert and ranks; on every rank of the group.
    """
    group = layers[0].ep_group
    own = torch.stack([_digests(layer) for layer in layers])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone).cpu()  # [ranks, layers, slots]
    for number, layer in enumerate(layers):
        seen: dict[int, dict[int, list[int]]] = {}
        for rank, slots in enumerate(layer.holding):
            for slot, expert in enumerate(slots):
                digest = int(table[rank, number, slot])
                ranks = seen.setdefault(expert, {}).setdefault(digest, [])
                ranks.append(dist.get_global_rank(group, rank))
        for expert, digests in seen.items():
            if len(digests) > 1:
                raise ReplicaMismatchError(
                    f"layer {layer.layer_number}, expert {expert}: replicas differ between ranks "
                    f"{' and '.join(str(ranks) for ranks in digests.values())}: resume from a "
                    "checkpoint, and run a memory and a network check on these nodes"
                )


def _digests(layer: ReplicatedMoELayer) -> torch.Tensor:
    """Returns one number per local slot that depends on every bit and its place."""
    totals = [torch.zeros((), dtype=torch.int64) for _ in range(layer.num_local_experts)]
    for parameters in layer.parameters_by_kind().values():
        words = [p.data.reshape(-1).view(_WORDS[p.element_size()]) for p in parameters]
        places = torch.arange(1, words[0].numel() + 1, device=words[0].device)
        for slot, word in enumerate(words):
            # Odd multipliers, modulo 2**64: changing one word always changes the sum.
            mixed = (word.to(torch.int64) * (2 * places - 1)).sum()
            totals[slot] = totals[slot].to(mixed.device) * 1_000_003 + mixed
    return torch.stack(totals)
