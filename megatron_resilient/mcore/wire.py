"""Tokens compressed while they travel between ranks: bf16, or scaled e4m3 with a scale per row.

Used as hooks around dispatch and combine; gradients travel back in the same form. Only bytes are
moved in between (the all-to-all dispatcher), so that nothing is added up in a narrow type.

Error of one journey of a number x in a row whose largest magnitude is a:

    bf16   at most 2^-8 |x|, for x in the range of normal bf16 numbers
    fp8    at most max(2^-4 |x|, 2^-10 a / 448), for a from 448 times the least normal fp32 number

A row with NaN or infinity arrives with NaN. Shapes: T rows, H hidden size.
"""

from typing import Any

import torch

from megatron_resilient.mcore.layer_hooks import LayerHooks

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_BYTES = 4


def wire_hooks(dtype: str) -> tuple[LayerHooks, ...]:
    """Returns the hooks of `--resilient-wire-dtype`; none for "model"."""
    if dtype == "model":
        return ()
    pack, unpack = {"bf16": (_to_bf16, _to_model), "fp8": (_pack, _unpack)}[dtype]
    return (LayerHooks(None, pack, unpack, pack, unpack, None),)


def pack_rows(rows_TH: torch.Tensor) -> torch.Tensor:
    """Packs rows into their e4m3 bytes and an fp32 scale each.

    Args:
        rows_TH: any floating type; H even.

    Returns:
        [T, (H + 4) / 2] of bf16, whose bits mean nothing as numbers: a floating type, so that
        autograd takes it.
    """
    wide = rows_TH.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    least = torch.finfo(torch.float32).tiny
    scale = torch.where(largest == 0, 1.0, largest / E4M3_MAX).clamp(min=least)
    quantised = (wide / scale).to(E4M3).view(torch.uint8)
    return torch.cat([quantised, scale.view(torch.uint8)], dim=1).view(torch.bfloat16)


def unpack_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows of `pack_rows`, [T, H], in `dtype`."""
    content = packed.contiguous().view(torch.uint8)
    quantised = content[:, :-SCALE_BYTES].contiguous().view(E4M3)
    scale = content[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return (quantised.float() * scale).to(dtype)


class Pack(torch.autograd.Function):
    """Packs rows; its gradient arrives packed by `Unpack`."""

    @staticmethod
    def forward(ctx: Any, rows_TH: torch.Tensor) -> torch.Tensor:
        """Returns packed rows."""
        ctx.dtype = rows_TH.dtype
        return pack_rows(rows_TH)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Unpacks the gradient."""
        return unpack_rows(gradient, ctx.dtype)


class Unpack(torch.autograd.Function):
    """Unpacks rows; sends their gradient packed."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns rows in `dtype`."""
        return unpack_rows(packed, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Packs the gradient."""
        return pack_rows(gradient), None


def _to_bf16(tokens: torch.Tensor, layer: Any) -> torch.Tensor:
    return tokens.to(torch.bfloat16)


def _to_model(tokens: torch.Tensor, layer: Any) -> torch.Tensor:
    return tokens.to(layer.config.params_dtype)


def _pack(tokens: torch.Tensor, layer: Any) -> torch.Tensor:
    return Pack.apply(tokens)


def _unpack(packed: torch.Tensor, layer: Any) -> torch.Tensor:
    return Unpack.apply(packed, layer.config.params_dtype)
