"""Tells all ranks what each one has to say, as JSON: nothing that a peer sends is unpickled."""

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilient.comm.device import device_of


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, by rank. Collective.

    Two all-gathers, of lengths and of compressed text padded to the longest.

    Args:
        value: whatever JSON can say.
        group: default: all ranks.
    """
    device = device_of(group)
    text = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), level=1)
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    own = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.all_gather(lengths, own, group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(zlib.decompress(bytes(raw[: int(length)].cpu().numpy())))
        for raw, length in zip(gathered, lengths, strict=True)
    ]
