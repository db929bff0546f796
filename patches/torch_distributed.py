"""torch.distributed on a machine without CUDA: gloo, with what gloo lacks emulated.

Gloo has no uneven all-gather or reduce-scatter, no mean, and wants split sizes as lists of int.
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


def _reduce_scatter(original):
    @functools.wraps(original)
    def reduce_scatter(output, input_list, op=None, group=None, async_op=False):
        import torch
        import torch.distributed as dist

        op = dist.ReduceOp.SUM if op is None else op
        rows = [t.shape[0] if t.dim() else 1 for t in input_list]
        if async_op or len(set(rows)) == 1:
            return original(output, input_list, op, group, async_op)
        # Sums all parts everywhere and keeps one: more bytes than needed, right for any sizes.
        total = torch.cat([t.contiguous() for t in input_list])
        dist.all_reduce(total, op, group)
        output.copy_(total.split(rows)[dist.get_rank(group)])
        return None

    return reduce_scatter


def _all_reduce(original):
    @functools.wraps(original)
    def all_reduce(tensor, op=None, group=None, async_op=False):
        import torch.distributed as dist

        if op is None:
            op = dist.ReduceOp.SUM
        if op != dist.ReduceOp.AVG:
            return original(tensor, op, group, async_op)
        # Gloo has no mean. Dividing first lets an asynchronous call stay one call.
        tensor.div_(dist.get_world_size(group))
        return original(tensor, dist.ReduceOp.SUM, group, async_op)

    return all_reduce


def _reduce_scatter_tensor(original):
    @functools.wraps(original)
    def reduce_scatter_tensor(output, input, op=None, group=None, async_op=False):
        import torch.distributed as dist

        if op is None:
            op = dist.ReduceOp.SUM
        if op != dist.ReduceOp.AVG:
            return original(output, input, op, group, async_op)
        return original(
            output, input / dist.get_world_size(group), dist.ReduceOp.SUM, group, async_op
        )

    return reduce_scatter_tensor


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
    _patch(
        "reduce_scatter", _reduce_scatter, "Gloo refuses tensors of unequal size (expert TP > 1)."
    ),
    _patch(
        "reduce_scatter_tensor",
        _reduce_scatter_tensor,
        "Gloo has no ReduceOp.AVG (--ddp-average-in-collective).",
    ),
    _patch("all_reduce", _all_reduce, "Gloo has no ReduceOp.AVG (global auxiliary losses)."),
)
