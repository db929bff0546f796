"""Tensor factories and conversions on a machine without CUDA: `cuda` means the CPU."""

import functools
from typing import Any

from megatron_resilient.patching.registry import Patch

from .torch_cuda import TORCH

FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda(device: Any) -> bool:
    """Tells whether `device` names a CUDA device, as a string or as a torch.device."""
    if isinstance(device, str):
        return device.startswith("cuda")
    # A tensor may stand in the same place, and has a `type` as well: a method.
    return getattr(device, "type", None) == "cuda"


def _factory(original):
    @functools.wraps(original)
    def factory(*args, **kwargs):
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # page-locking memory needs a driver
        return original(*args, **kwargs)

    return factory


def _to(original):
    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args and (is_cuda(args[0]) or type(args[0]) is int):
            args = ("cpu", *args[1:])
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return to


def _cuda(original):
    @functools.wraps(original)
    def cuda(self, device=None, non_blocking=False, memory_format=None):
        return self

    return cuda


def _type(original):
    @functools.wraps(original)
    def type_(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, non_blocking, **kwargs)

    return type_


def _itself(original):
    @functools.wraps(original)
    def itself(self, *args, **kwargs):
        return self

    return itself


def _patch(target: str, make, reason: str) -> Patch:
    name = target.split(":")[1]
    return Patch(
        id=f"cpu.{name.lower().replace('.', '-').replace('_', '-')}",
        group="cpu",
        target=target,
        kind="wrap",
        make=make,
        reason=reason,
        no_seam="`device='cuda'` stands as a literal in about a hundred places of Megatron.",
        upstream="torch",
        versions=TORCH,
        removable_when="Megatron asks torch.accelerator, or an argument, for its device.",
    )


PATCHES = (
    *(
        _patch(f"torch:{name}", _factory, "A `cuda` device, or pinned memory, raises.")
        for name in FACTORIES
    ),
    *(
        _patch(f"torch:Tensor.{name}", _factory, "A `cuda` device raises.")
        for name in TENSOR_FACTORIES
    ),
    _patch("torch:Tensor.to", _to, "A `cuda` device, or its number, raises."),
    _patch("torch:Tensor.cuda", _cuda, "It raises; the tensor is where it belongs."),
    _patch(
        "torch:Tensor.type",
        _type,
        "The optimizers compare `param.type()` with 'torch.cuda.FloatTensor' to tell fp32 "
        "parameters from half-precision ones.",
    ),
    _patch("torch:Tensor.pin_memory", _itself, "Page-locking memory needs a driver."),
    _patch("torch:Tensor.record_stream", _itself, "There is no stream to outlive."),
)
