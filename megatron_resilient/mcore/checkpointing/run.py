"""The checkpoints of the run in this process: opened before the model is built, kept to its end."""

import atexit
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args
from torch import nn

from megatron_resilient.checkpoint import choose
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.config import CheckpointConfig
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.contents import Contents
from megatron_resilient.mcore.checkpointing.loading import Loaded, load
from megatron_resilient.mcore.checkpointing.saver import Saver
from megatron_resilient.mcore.checkpointing.saves import Saved
from megatron_resilient.mcore.checkpointing.storage import Storage
from megatron_resilient.mcore.expert_load import ExpertLoad
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

_storage: Storage | None = None
_generation: "_Generation | None" = None


class _Generation:
    """Saves of one generation."""

    def __init__(self, saver: Saver, model: list[nn.Module], tell: Callable[[Saved], None]) -> None:
        self.saver, self.load, self.tell = saver, ExpertLoad(model), tell

    def say(self, ended: list[Saved]) -> None:
        for each in ended:
            if each.failed is not None:
                print(
                    f"WARNING: the save of step {each.step} has failed, training goes on: "
                    f"{each.failed}",
                    flush=True,
                )
            self.tell(each)


def open_storage(directory: Path, config: CheckpointConfig, goes_on: bool) -> None:
    """Takes the folder that a run saves into, before anything is restored. Collective.

    Args:
        directory: the folder.
        config: flags.
        goes_on: it is another generation of the run that this process is in, if it is in one.

    Raises:
        CheckpointError: another run holds it, or it cannot be written; the same on every rank.
    """
    global _storage
    if _storage is not None and not goes_on:
        close()
    facts = _storage.facts() if _storage is not None else None
    told = gather_json({"facts": facts, "new": secrets.token_hex(8)})
    # A failure may have caught ranks before and after they heard that a save is there.
    known = max(
        (each["facts"] for each in told if each["facts"]),
        key=lambda each: (each["base"] or -1, each["saves"]),
        default=None,
    )
    if known and facts and facts != known:
        assert _storage is not None
        _storage.adopt(known)
    run = known["run"] if known else told[0]["new"]
    first = known is None
    for begins in (True, False):  # whoever begins holds the lock before others join it
        error = None
        if _storage is None and begins == (first and dist.get_rank() == 0):
            try:
                _storage = Storage(directory, run, config, first=begins)
                if known:
                    _storage.adopt(known)
            except CheckpointError as caught:
                error = str(caught)
        errors = [text for text in gather_json(error) if text]
        if errors:
            raise CheckpointError(errors[0])


def refuse_later_saves(step: int) -> None:
    """Sees to it that a run's saves are the newest of its folder. Collective.

    Else they would be the first to be collected, and a restart would take one of the others.

    Args:
        step: at which the run begins.

    Raises:
        CheckpointError: the folder has a save of a later step; the same on every rank.
    """
    assert _storage is not None
    directory, later = _storage.directory, None
    if dist.get_rank() == 0:
        later = next((each for each in places.manifests(directory) if each > step), None)
    if (later := gather_json(later)[0]) is not None:
        raise CheckpointError(
            f"--save {directory}: has a save of step {later}, and this run begins at step {step}: "
            f"go on from it (--load {directory}), or save into another folder"
        )


def close() -> None:
    """Lets the folder go, and ends the worker."""
    global _storage
    if _storage is not None:
        _storage.close()
        _storage = None


atexit.register(close)


def load_into(directory: Path, contents: Contents, goes_back: bool) -> Loaded:
    """Loads the newest checkpoint of a folder that is whole. Collective.

    Args:
        directory: which may be another than the run's.
        contents: of a new model.
        goes_back: the run goes on from there; otherwise only some of what was loaded is used.

    Raises:
        CheckpointError: there is none that can be used.
    """
    memory = None
    if _storage is not None and directory.resolve() == _storage.directory.resolve():
        memory = _storage.memory
    loaded = load(directory, contents, place=goes_back, memory=memory)
    if goes_back and _storage is not None and not get_args().finetune:
        lost, share = _resume(_storage, directory, loaded)
        loaded = replace(loaded, lost_tokens=lost, lost_share=share)
    return loaded


def _resume(storage: Storage, directory: Path, loaded: Loaded) -> tuple[int, float]:
    """Goes on from what was loaded; returns what that lost (see `Loaded`). Collective."""
    args = get_args()
    chosen = loaded.chosen
    planned = args.train_iters * args.global_batch_size * args.seq_length
    lost, share = storage.resume(
        directory, chosen, planned * (args.moe_router_topk or 1), loaded.newer
    )
    if lost and dist.get_rank() == 0:
        print(
            f"WARNING: experts of the checkpoint of step {loaded.step} are of older steps: the "
            f"updates of {lost:,} token-expert pairs are lost, {share:.2%} of the planned training",
            flush=True,
        )
    raised = storage.adapt_k(share, loaded.step, args.save_interval, args.train_iters)
    if raised is not None and dist.get_rank() == 0:
        print(
            f"partial saves write {raised} experts of each layer from now on: otherwise more than "
            "--resilient-checkpoint-lost-tokens would be lost",
            flush=True,
        )
    storage.base = None
    if directory.resolve() == storage.directory.resolve():
        error = None
        if dist.get_rank() == 0:
            try:
                choose.adopt(directory, chosen)
            except CheckpointError as caught:
                error = str(caught)
        if told := gather_json(error)[0]:
            raise CheckpointError(told)
        if chosen.manifest.state["masters"] == storage.masters:
            storage.base = chosen.manifest.step
    return lost, share


def begin(
    model: list[nn.Module],
    optimizer: Any,
    scheduler: Any,
    layers: list[ReplicatedMoELayer],
    config: CheckpointConfig,
    tell: Callable[[Saved], None],
) -> None:
    """Begins a generation, whose model is complete. Local.

    Args:
        model: the model chunks.
        optimizer: Megatron's; saves are awaited before it changes anything.
        scheduler: Megatron's learning-rate scheduler.
        layers: the replicated layers.
        config: flags.
        tell: called on every rank with each save that has come to an end.
    """
    global _generation
    assert _storage is not None
    contents = Contents(model, optimizer, scheduler, layers)
    saver = Saver(_storage, contents, config, get_args().save_retain_interval or 0)
    _generation = _Generation(saver, model, tell)
    _storage.lock.ready()
    update = optimizer.step_with_ready_grads

    def wait_and_update() -> Any:
        saver.before_update()
        return update()

    optimizer.step_with_ready_grads = wait_and_update


def is_open() -> bool:
    """Whether this run saves in the per-expert format."""
    return _generation is not None


def save(step: int, progress: dict[str, Any]) -> str:
    """Begins a save. Collective.

    Returns:
        The path of its manifest to be.
    """
    assert _generation is not None
    assert _storage is not None
    _generation.say(_generation.saver.save(step, progress, _generation.load.own()))
    return str(places.manifest_path(_storage.directory, step))


def wait_for_copy() -> None:
    """Waits until nothing reads the state any more: a step is over, with an update or without."""
    if _generation is not None:
        _generation.saver.before_update()


def poll() -> None:
    """Looks how far saves have come, between two steps. Collective."""
    if _generation is not None:
        _generation.say(_generation.saver.poll())


def finish() -> None:
    """Waits for all saves. Collective."""
    if _generation is not None:
        _generation.say(_generation.saver.finish())


def abandon() -> None:
    """Gives up saves that are on their way: their generation is over. Local."""
    global _generation
    if _generation is not None:
        _generation.saver.abandon()
        _generation.load.remove()
        _generation = None
