"""Builds Megatron for a new generation and gives it the state of the one before."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.checkpointing import checkpoint_exists
from torch import nn

from megatron_resilient.checkpoint.directory import manifests
from megatron_resilient.config import config_from_args
from megatron_resilient.errors import LostStateError
from megatron_resilient.mcore.recovery import refill
from megatron_resilient.mcore.recovery.outcome import Outcome
from megatron_resilient.mcore.recovery.progress import Progress
from megatron_resilient.mcore.recovery.rejoined import Rejoined
from megatron_resilient.mcore.recovery.session import Session

Built = tuple[list[nn.Module], Any, Any]
_overlays = False


def overlays() -> bool:
    """Whether what is being loaded will be written over but for the experts that are lost."""
    return _overlays


def build(
    session: Session, original: Callable[..., Built], *args: Any, **kwargs: Any
) -> tuple[Built, Rejoined | None]:
    """Runs Megatron's `setup_model_and_optimizer`, then fills what it built from memory.

    Collective over all ranks.

    Returns:
        (model, optimizer, scheduler), and how they were filled: None for a start of the job.

    Raises:
        LostStateError: state is lost, and there is no checkpoint to take it from.
    """
    newest = session.newest()
    if newest is None:
        return _start(session, original, *args, **kwargs)
    options = get_args()
    with _changed(load=None, pretrained_checkpoint=None):
        built = original(*args, **kwargs)
    session.model, optimizer, scheduler = built
    session.clock["built"] = time.time()
    assert session.world is not None
    planned = refill.prepare(session.model, optimizer, session.old, session.world)
    progress = Progress(**newest["progress"])
    exact = config_from_args(options).elastic.require_exact
    saved_step = progress.step
    if planned.plan.missing:
        saved_step = _load(session, built, planned, back=bool(planned.lost_dense) or exact)
    if planned.lost_dense or (planned.plan.missing and exact):
        rejoined = Rejoined(
            "checkpoint",
            saved_step,
            lost_steps=progress.step - saved_step,
            lost_experts=tuple(planned.lost_experts),
            loads=planned.loads,
        )
        return built, rejoined
    sent = refill.carry_out(planned, session.model, optimizer, session.old, progress.step)
    progress.apply(optimizer, scheduler)
    replay = _replay(session, newest)
    if replay is not None:
        options.iteration -= 1
    rejoined = Rejoined(
        "checkpoint" if planned.plan.missing else "memory",
        progress.step,
        lost_experts=tuple(planned.lost_experts),
        lost_expert_tokens=_lost_tokens(planned, progress.step, saved_step),
        bytes=sent,
        experts_moved=planned.experts_moved,
        replay=replay,
        loads=planned.loads,
    )
    return built, rejoined


def _start(
    session: Session, original: Callable[..., Built], *args: Any, **kwargs: Any
) -> tuple[Built, Rejoined | None]:
    """Builds a model of which nobody has any state: the job begins, or lost all of its nodes.

    Raises:
        LostStateError: they are lost, and there is no checkpoint.
    """
    assert session.world is not None
    reached = session.world.newest_step
    folder = _newest_checkpoint(f"the state of step {reached}") if reached else get_args().load
    with _changed(load=folder):
        built = original(*args, **kwargs)
    session.model = built[0]
    if not reached:
        return built, None
    step = get_args().iteration
    return built, Rejoined("checkpoint", step, lost_steps=max(0, reached - step))


@contextlib.contextmanager
def _changed(**flags: Any) -> Iterator[None]:
    """Gives Megatron's arguments other values for a while."""
    options = get_args()
    asked = {name: getattr(options, name) for name in flags}
    vars(options).update(flags)
    try:
        yield
    finally:
        vars(options).update(asked)


def _newest_checkpoint(lost: str) -> str:
    """Returns the folder with the newest checkpoint, and says that it is needed.

    Raises:
        LostStateError: there is none.
    """
    options = get_args()
    folders = [folder for folder in (options.save, options.load) if folder]
    folder: str | None = next((folder for folder in folders if _has_checkpoint(folder)), None)
    if folder is None:
        raise LostStateError(
            f"no live rank has {lost}, and there is no checkpoint in "
            f"{' or '.join(folders) or '--save or --load'}: start again, with more slots "
            "(--resilient-slots-per-rank) or with --save"
        )
    if torch.distributed.get_rank() == 0:
        print(f"WARNING: no live rank has {lost}; loading it from {folder}", flush=True)
    return folder


def _has_checkpoint(folder: str) -> bool:
    return bool(manifests(Path(folder))) or checkpoint_exists(folder)


def _replay(session: Session, newest: dict[str, Any]) -> Outcome | None:
    """Returns the outcome of the newest step if nobody has gone on to the next one."""
    assert session.world is not None
    if newest["begun"] or not newest["outcome"]:
        return None
    told = [
        Outcome(**seat.state["outcome"])
        for seat in session.world.everybody
        if seat.state.get("step") == newest["step"] and seat.state.get("outcome")
    ]
    best = max(told, key=lambda outcome: len(outcome.losses))
    return best if mpu.is_pipeline_last_stage() else replace(best, losses={})


def _load(session: Session, built: Built, planned: refill.Refill, back: bool) -> int:
    """Loads the newest checkpoint for what is lost.

    Args:
        session: of this process.
        built: what is to be filled.
        planned: says what is lost.
        back: all go back to it.

    Returns:
        Its step.
    """
    from megatron.training import training

    global _overlays
    options = get_args()
    _overlays = not back
    try:
        with _changed(load=_newest_checkpoint(_describe(planned))):
            options.iteration, options.num_floating_point_operations_so_far = (
                training.load_checkpoint(*built)
            )
    finally:
        _overlays = False
    return int(options.iteration)


def _describe(planned: refill.Refill) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, expert in planned.lost_experts:
        by_layer.setdefault(layer, []).append(expert)
    parts = [f"experts {experts} of layer {layer}" for layer, experts in by_layer.items()]
    if planned.lost_dense:
        parts.append(
            f"{len(planned.lost_dense)} parts of the dense state ({planned.lost_dense[0]}, ...)"
        )
    return "; ".join(parts)


def _lost_tokens(planned: refill.Refill, step: int, saved_step: int) -> int:
    options = get_args()
    per_step = options.global_batch_size * options.seq_length * (options.moe_router_topk or 1)
    lost = 0.0
    for layer, expert in planned.lost_experts:
        tokens = planned.loads.get(layer)
        share = tokens[expert] / max(1, sum(tokens)) if tokens else 1 / options.num_experts
        lost += share * per_step * (step - saved_step)
    return round(lost)
