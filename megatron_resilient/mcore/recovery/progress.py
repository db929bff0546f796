"""How far training has come, beside weights and optimizer: what Megatron keeps in its arguments."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args
from megatron.training.training import num_floating_point_operations

from megatron_resilient.mcore.optimizer_state import single_optimizers


@dataclass(frozen=True)
class Progress:
    """The position between two steps; the same on every rank. Plain values, fit for JSON.

    Attributes:
        step: steps done.
        consumed_train_samples: samples of the training set before the next step.
        skipped_train_samples: as Megatron counts them.
        consumed_valid_samples: samples of the validation set before the next evaluation.
        scheduler_steps: the learning-rate scheduler's own count, in samples.
        flops: floating-point operations so far.
        loss_scale: state of fp16's dynamic loss scale; empty without one.
    """

    step: int
    consumed_train_samples: int
    skipped_train_samples: int
    consumed_valid_samples: int
    scheduler_steps: int
    flops: float
    loss_scale: dict[str, float]

    @classmethod
    def now(cls, optimizer: Any, scheduler: Any) -> "Progress":
        """Reads the position before the first step of a generation."""
        args = get_args()
        return cls(
            step=args.iteration,
            consumed_train_samples=args.consumed_train_samples,
            skipped_train_samples=args.skipped_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
            scheduler_steps=int(scheduler.num_steps),
            flops=float(args.num_floating_point_operations_so_far),
            loss_scale=_loss_scale(optimizer),
        )

    def after_step(self, optimizer: Any, skipped: bool) -> "Progress":
        """Returns the position after one more step, whose gradients are ready.

        Args:
            optimizer: has moved its loss scale already.
            skipped: whether the update is left out (the learning rate does not move then).
        """
        samples = get_current_running_global_batch_size()
        return replace(
            self,
            step=self.step + 1,
            consumed_train_samples=self.consumed_train_samples + samples,
            scheduler_steps=self.scheduler_steps + (0 if skipped else samples),
            flops=self.flops + float(num_floating_point_operations(get_args(), samples)),
            loss_scale=_loss_scale(optimizer),
        )

    def with_evaluations(self) -> "Progress":
        """Returns the position with the validation samples that were used since."""
        return replace(self, consumed_valid_samples=get_args().consumed_valid_samples)

    def apply(self, optimizer: Any, scheduler: Any) -> None:
        """Has Megatron go on from here; optimizer and scheduler are new ones."""
        args = get_args()
        args.iteration = self.step
        args.consumed_train_samples = self.consumed_train_samples
        args.skipped_train_samples = self.skipped_train_samples
        args.consumed_valid_samples = self.consumed_valid_samples
        args.num_floating_point_operations_so_far = self.flops
        if scheduler is not None:  # None: nothing is trained
            scheduler.step(increment=self.scheduler_steps - int(scheduler.num_steps))
        for scaler in _scalers(optimizer) if self.loss_scale else ():
            state = scaler.state_dict()
            state["scale"] = state["scale"].new_tensor([self.loss_scale["scale"]])
            state["growth_tracker"] = int(self.loss_scale["growth_tracker"])
            state["hysteresis_tracker"] = int(self.loss_scale["hysteresis_tracker"])
            scaler.load_state_dict(state)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return asdict(self)


def _scalers(optimizer: Any) -> list[Any]:
    scalers = [getattr(single, "grad_scaler", None) for single in single_optimizers(optimizer)]
    return [scaler for scaler in scalers if scaler is not None and scaler.state_dict()]


def _loss_scale(optimizer: Any) -> dict[str, float]:
    for scaler in _scalers(optimizer):
        return {name: float(value) for name, value in scaler.state_dict().items()}
    return {}
