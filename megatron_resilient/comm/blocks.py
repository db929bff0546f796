"""Rows in blocks: put in another order, and back; several tensors of the same rows as one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def arrange(x: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Puts blocks in another order.

    Args:
        x: [sum(sizes), ...].
        sizes: rows of each block.
        order: which block comes first, second, ...

    Returns:
        [sum(sizes), ...]; `x` itself where the order is that which it has.
    """
    if all(place == i for i, place in enumerate(order)):
        return x
    blocks = x.split(list(sizes))
    return torch.cat([blocks[place] for place in order])


def restore(x: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Undoes `arrange` of the same sizes and order."""
    if all(place == i for i, place in enumerate(order)):
        return x
    blocks = x.split([sizes[place] for place in order])
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([blocks[i] for i in back])


@dataclass(frozen=True)
class Form:
    """What a tensor of rows looks like, but for the number of its rows.

    Attributes:
        dtype: of its elements.
        shape: of one row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Returns the form of [rows, ...]."""
        return cls(tensor.dtype, tuple(tensor.shape[1:]))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns tensors of the same rows as one, so that they travel in one message.

    Args:
        tensors: [rows, ...] each.

    Returns:
        A single tensor as it is; of several their bytes, [rows, bytes of a row].
    """
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([_bytes(tensor) for tensor in tensors], dim=1)


def unpack(
    packed: torch.Tensor, forms: Sequence[Form], sizes: Sequence[int], order: Sequence[int]
) -> list[torch.Tensor]:
    """Takes `pack`'s result apart and arranges its blocks, in one copy.

    Args:
        packed: [sum(sizes), ...].
        forms: of what was packed.
        sizes: see `arrange`.
        order: see `arrange`.
    """
    if len(forms) == 1:
        return [arrange(packed, sizes, order)]
    tensors, start = [], 0
    for form in forms:
        columns = packed[:, start : start + form.row_bytes]
        start += form.row_bytes
        rows = arrange(columns, sizes, order)
        if rows is columns:  # a copy in any case: wider types want an aligned beginning
            rows = columns.clone(memory_format=torch.contiguous_format)
        tensors.append(rows.view(form.dtype).view(-1, *form.shape))
    return tensors


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[0]
    width = Form.of(tensor).row_bytes // tensor.element_size()
    return tensor.contiguous().view(rows, width).view(torch.uint8)
