"""Where the tensors of a collective have to be."""

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device for collectives of a group (None: all ranks): NCCL knows GPUs only."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
