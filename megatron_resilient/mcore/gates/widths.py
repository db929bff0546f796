"""Which type a formula is computed in."""

import torch


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in at least fp32; fp64 stays, so that formulas can be checked in it."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
