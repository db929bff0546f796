"""What an elastic run does around each training step."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import get_args

from megatron_resilient.elastic.messages import SAVE_AND_END
from megatron_resilient.errors import CoordinatorLostError, ResilientError, TooFewNodesError
from megatron_resilient.mcore import uneven
from megatron_resilient.mcore.checkpointing import run as checkpoints
from megatron_resilient.mcore.recovery import faults, hand_over
from megatron_resilient.mcore.recovery.live_state import LiveState
from megatron_resilient.mcore.recovery.outcome import Outcome
from megatron_resilient.mcore.recovery.redundancy import guaranteed_losses
from megatron_resilient.mcore.recovery.session import Boundary, Session
from megatron_resilient.mcore.run_record import RunRecord


def train_step(
    session: Session, original: Callable[..., tuple], *args: Any, **kwargs: Any
) -> tuple[tuple, Outcome | None]:
    """Runs Megatron's `train_step`, or brings back what came of a step that is done already.

    Returns:
        (what train_step returns, the outcome that was brought back or None).

    Raises:
        Boundary: the membership changes here.
        Fenced: the generation is over.
    """
    live = session.live
    assert live is not None
    session.member.check()
    if session.world is not None and session.world.final:
        raise save_and_end(live, "too few nodes are left", TooFewNodesError)
    if live.replay is not None:
        outcome, live.replay = live.replay, None
        # Megatron adds the samples of a step after it, empty ones too; they are counted already.
        layout = uneven.training_layout()
        get_args().consumed_train_samples -= (
            layout.padded_batch if layout else get_current_running_global_batch_size()
        )
        return outcome.as_train_step(torch.cuda.current_device()), outcome
    if live.asked:
        _change(session, live)
    live.begin_step()
    faults.point("begin")
    arguments = list(args)
    arguments[0] = faults.in_microbatches(arguments[0])
    forward_backward = 6  # its place among train_step's arguments
    arguments[forward_backward] = live.watch_losses(arguments[forward_backward])
    result = original(*arguments, **kwargs)
    live.end_step()
    return result, None


def recorded(session: Session, record: RunRecord, loads: dict[int, list[int]]) -> None:
    """To be called when a step has been recorded and experts have been moved.

    Args:
        session: of this process.
        record: the run's record.
        loads: {layer: tokens per expert} that the placement was made for.
    """
    live = session.live
    assert live is not None
    live.loads = loads
    slots = [layer.slots for layer in record.replicated]
    if live.redundancy is None or live.redundancy[0] != slots:  # experts have moved
        assert session.world is not None
        least = guaranteed_losses(record.replicated, session.world, live.is_mirrored)
        live.redundancy = slots, least
    facts = record.latest | {"guaranteed_losses": live.redundancy[1]}
    session.member.report(step=live.progress.step, **facts)
    session.tell_recovery(record)


def _change(session: Session, live: LiveState) -> None:
    """Leaves this generation between two steps, with everybody alive."""
    if live.asked & SAVE_AND_END:
        raise save_and_end(live, "the coordinator stayed away for too long", CoordinatorLostError)
    checkpoints.finish()
    handed_over = hand_over.before_departure(session.member, live.arrays())
    if handed_over is None:
        raise save_and_end(live, "all nodes leave", SystemExit)
    live.extra, leaving = handed_over
    faults.point("leaving")
    raise Boundary(leaving)


def save_and_end(live: LiveState, why: str, kind: type[BaseException]) -> BaseException:
    """Saves a checkpoint if the run has a folder for it.

    Returns:
        The error to raise.
    """
    from megatron.training import training

    options = get_args()
    step = live.progress.step
    saved = f"there is no --save, so step {step} is lost"
    if options.save:
        training.save_checkpoint(
            step, live.model, live.optimizer, live.scheduler, live.progress.flops
        )
        training.maybe_finalize_async_save(blocking=True, terminate=True)
        saved = f"step {step} is saved in {options.save}"
    if issubclass(kind, ResilientError):
        return kind(f"{why}; {saved}: start the same command again to go on")
    return kind(0)
