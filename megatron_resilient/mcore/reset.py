"""Brings a process back to where it was before Megatron was set up, so that it can begin anew.

`pretrain()` may then be called again in the same process, for another world or other flags.
"""

import gc
from collections.abc import Iterable

import torch
from torch import nn


def reset_megatron(model_chunks: Iterable[nn.Module] = ()) -> None:
    """Drops Megatron's global state, its process groups, and the model.

    Local: no collective is called, so it also works when peers are gone. Nothing of the old model
    may be used afterwards.

    Args:
        model_chunks: the DDP-wrapped chunks that `setup_model_and_optimizer` returned.
    """
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import global_vars, training

    from megatron_resilient.mcore import train_hooks

    train_hooks.forget()
    for chunk in model_chunks:
        # Dispatchers keep the last autograd graph, the graph keeps DDP's hooks, and these keep
        # DDP: a cycle through C++ that the garbage collector cannot see.
        chunk.__dict__.clear()
    _release_autograd_queue()
    _release_rotary_embeddings()
    writer = global_vars.get_tensorboard_writer()
    if writer is not None:
        writer.close()
    destroy_moe_metrics_tracker()
    training.destroy_global_state()
    _forget_startup(training._STARTUP_TIMESTAMPS)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def _forget_startup(stamps: dict[str, float | None]) -> None:
    """Drops the start time that `pretrain()` noted.

    Where it finds one it asks all ranks for theirs: a rank that comes back would wait for ever for
    one that is new. One that the user's script noted, with its entry, is there on new ranks too.
    """
    if stamps["main_entry"] is None:
        stamps["program_start"] = None


def _release_rotary_embeddings() -> None:
    """Empties the caches of positions: each entry holds its module, and that a process group."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding as rotary
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    for kind in (rotary.RotaryEmbedding, yarn.YarnRotaryEmbedding):
        kind.forward.cache_clear()


def _release_autograd_queue() -> None:
    """Runs a trivial backward pass.

    After an exception in backward the engine's ready queue keeps that graph until the next run.
    """
    torch.ones(1, requires_grad=True).sum().backward()
