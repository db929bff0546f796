"""torch.distributed on a machine without CUDA: gloo, with what gloo lacks emulated.

Gloo has no uneven all-gather and wants split sizes as lists of int. (Its reduce-scatter takes
uneven parts, and it knows ReduceOp.AVG: tests/patches asks for both.)
"""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_cuda import TORCH


def _init_process_group(original):
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        if backend not in (None, "gloo", "fake"):
            from megatron_resilient.errors import ConfigError

            raise ConfigError(
                f"--distributed-backend {backend} does not run on the CPU: leave the flag out, "
                "or pass gloo"
            )
        kwargs.pop("device_id", None)
        return original(backend or "gloo", *args, **kwargs)

    return init_process_group


def _all_to_all_single(original):
    @functools.wraps(original)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        def as_list(sizes):
            return sizes.tolist() if hasattr(sizes, "tolist") else sizes

        return original(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs
        )

    return all_to_all_single


def _all_gather(original):
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        import torch

        rows = [t.shape[0] if t.dim() else 1 for t in tensor_list]
        if async_op or len(set(rows)) == 1:
            return original(tensor_list, tensor, group, async_op)
        # Every rank sends the longest length; what is padding is dropped at the receiver.
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        received = [torch.empty_like(padded) for _ in rows]
        original(received, padded, group, False)
        for target, source, count in zip(tensor_list, received, rows, strict=True):
            target.copy_(source[:count])
        return None

    return all_gather


def _patch(name: str, make, reason: str) -> Patch:
    return Patch(
        id=f"cpu.{name.replace('_', '-')}",
        group="cpu",
        target=f"torch.distributed.distributed_c10d:{name}",
        kind="wrap",
        make=make,
        reason=reason,
        no_seam="Megatron calls torch.distributed directly.",
        upstream="torch",
        versions=TORCH,
        bound_in=(f"torch.distributed:{name}",),
        removable_when="gloo does what NCCL does here.",
    )


PATCHES = (
    _patch(
        "init_process_group",
        _init_process_group,
        "A CUDA `device_id` is refused by gloo; NCCL needs a GPU and says so late and badly.",
    ),
    _patch(
        "all_to_all_single",
        _all_to_all_single,
        "The dispatchers leave split sizes as CPU tensors or arrays; gloo wants lists.",
    ),
    _patch("all_gather", _all_gather, "Gloo refuses tensors of unequal size (expert TP > 1)."),
)
