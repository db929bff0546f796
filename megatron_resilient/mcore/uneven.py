"""Worlds that do not fit: the global batch stays, on any number of data-parallel ranks.

Where the ranks divide the microbatches of a step nothing here does anything: each function then
calls Megatron's alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    NumMicroBatchesCalculator,
)
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args, global_vars
from torch import nn

from megatron_resilient.algorithms.microbatches import Microbatches, StepSampler
from megatron_resilient.mcore import empty_microbatches
from megatron_resilient.mcore.empty_microbatches import WeighedForwardStep
from megatron_resilient.mcore.uneven_arguments import interleaving


class UnevenMicroBatches(ConstantNumMicroBatchesCalculator):
    """Megatron's calculator for a constant batch, empty microbatches included."""

    def __init__(self, layout: Microbatches):
        """Builds it without the parent's demand that the ranks divide the batch."""
        NumMicroBatchesCalculator.__init__(self)
        self.num_micro_batches = layout.per_rank
        self.current_global_batch_size = layout.batch
        self.current_running_global_batch_size = layout.batch
        self.micro_batch_size = layout.micro


def calculator(
    original: Callable[..., NumMicroBatchesCalculator],
    rank: int,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """Builds the calculator of microbatches. The arguments are Megatron's."""
    if step_batch_size_schedule is None and not decrease_batch_size_if_needed:
        assert global_batch_size is not None
        flags = global_vars._GLOBAL_ARGS  # None where microbatches are used without training
        schedule = interleaving(flags) if flags is not None else (1, 1)
        layout = Microbatches(global_batch_size, micro_batch_size, data_parallel_size, *schedule)
        if not layout.fits and global_batch_size % micro_batch_size == 0:
            return UnevenMicroBatches(layout)
    return original(
        rank,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def training_layout() -> Microbatches | None:
    """Returns how a training step is cut, None if the world fits."""
    args = get_args()
    if args.step_batch_size_schedule is not None or args.decrease_batch_size_if_needed:
        return None
    return _uneven(args.global_batch_size, args.micro_batch_size)


def evaluation_layout() -> Microbatches | None:
    """Returns how a step of an evaluation is cut, None if the world fits."""
    args = get_args()
    return _uneven(args.eval_global_batch_size, args.eval_micro_batch_size)


def _uneven(batch: int, micro: int) -> Microbatches | None:
    ranks = mpu.get_data_parallel_world_size()
    layout = Microbatches(batch, micro, ranks, *interleaving(get_args()))
    return None if layout.fits else layout


def attach(model: list[nn.Module]) -> None:
    """Prepares a new model, if the world does not fit the batch of training or of evaluation."""
    if training_layout() or evaluation_layout():
        empty_microbatches.attach(model)


def train_step(
    original: Callable[..., tuple],
    forward_step: Callable[..., tuple],
    data_iterator: Any,
    model: list[nn.Module],
    optimizer: Any,
    scheduler: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """Runs Megatron's train_step; the schedule and the samples advance by the global batch.

    Megatron adds the samples that were run to `args.consumed_train_samples` after this returns;
    what it adds too much is taken off here.
    """
    layout = training_layout()
    if layout is None:
        return original(
            forward_step, data_iterator, model, optimizer, scheduler, config, *args, **kwargs
        )
    weighed = _weighed(forward_step, layout, config.calculate_per_token_loss)
    advance = SimpleNamespace(step=lambda increment: scheduler.step(increment=layout.batch))
    try:
        with _weighed_auxiliary_losses(config, layout):
            result = original(
                weighed, data_iterator, model, optimizer, advance, config, *args, **kwargs
            )
    finally:
        empty_microbatches.end()
    _weigh_logged(layout.weight)
    should_exit = result[3]
    if not should_exit:
        get_args().consumed_train_samples -= layout.padded_batch - layout.batch
    return result


def evaluate(
    original: Callable[..., tuple], forward_step: Callable[..., tuple], *args: Any, **kwargs: Any
) -> tuple:
    """Runs Megatron's evaluate on steps of --eval-global-batch-size samples."""
    layout = evaluation_layout()
    if layout is None:
        return original(forward_step, *args, **kwargs)
    flags = get_args()
    before = flags.consumed_valid_samples
    # Megatron takes from it how many microbatches each rank runs.
    flags.eval_global_batch_size = layout.padded_batch
    try:
        return original(_weighed(forward_step, layout, per_token=True), *args, **kwargs)
    finally:
        empty_microbatches.end()
        flags.eval_global_batch_size = layout.batch
        steps = (flags.consumed_valid_samples - before) // layout.padded_batch
        flags.consumed_valid_samples = before + steps * layout.batch


def data_loader(original: Callable[..., Any], dataset: Any, consumed_samples: int) -> Any:
    """Builds a data loader that knows where a step begins."""
    loader = original(dataset, consumed_samples)
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    is_evaluation = split in (Split.valid, Split.test)
    layout = evaluation_layout() if is_evaluation else training_layout()
    if layout is None or not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    rank = mpu.get_data_parallel_rank()
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=StepSampler(layout, rank, consumed_samples, len(loader.dataset)),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        worker_init_fn=loader.worker_init_fn,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
    )


def _weighed(
    forward_step: Callable[..., tuple], layout: Microbatches, per_token: bool
) -> WeighedForwardStep:
    return WeighedForwardStep(forward_step, layout, mpu.get_data_parallel_rank(), per_token)


@contextlib.contextmanager
def _weighed_auxiliary_losses(config: Any, layout: Microbatches) -> Iterator[None]:
    """Gives auxiliary losses the weight of real microbatches, while the block runs.

    One scale serves all microbatches of a step: Megatron keeps it in a class, sets it in forward
    passes and reads it in backward passes of others. Empty ones have no auxiliary loss.
    """
    if config.calculate_per_token_loss:  # divided by the real tokens
        yield
        return
    names = ("moe_grad_scale_func", "mtp_grad_scale_func")
    before = {name: getattr(config, name, None) for name in names}
    for name, scale in before.items():
        setattr(config, name, partial(_scale, scale, config.grad_scale_func, layout.weight))
    try:
        yield
    finally:
        for name, scale in before.items():
            setattr(config, name, scale)


def _scale(own: Callable[[], Any] | None, loss_scale: Callable[..., Any] | None, weight: float):
    """Returns Megatron's scale of an auxiliary loss times `weight`."""
    if own is not None:
        return own() * weight
    one = torch.ones(1, device=torch.cuda.current_device())
    return (one if loss_scale is None else loss_scale(one)) * weight


def _weigh_logged(weight: float) -> None:
    """Weighs auxiliary losses that will be logged: means over all microbatches, of real ones."""
    for entry in get_moe_metrics_tracker().metrics.values():
        entry.values.mul_(weight)
    if "loss_values" in MTPLossLoggingHelper.tracker:
        MTPLossLoggingHelper.tracker["loss_values"].mul_(weight)
