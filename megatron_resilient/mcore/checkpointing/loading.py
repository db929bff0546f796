"""Gives a new model the state of a per-expert checkpoint, whatever world that was written in."""

import socket
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training import get_args

from megatron_resilient.algorithms.refill_plan import Piece, plan_refill
from megatron_resilient.checkpoint.choose import Chosen
from megatron_resilient.checkpoint.manifest import Expert, Manifest, Stretch, expert_of
from megatron_resilient.checkpoint.snapshot import dtype_name
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.pieces import exchange
from megatron_resilient.comm.transfer import Holding
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore import expert_rng
from megatron_resilient.mcore.checkpointing.contents import (
    Contents,
    identity,
    random_key,
)
from megatron_resilient.mcore.checkpointing.memory import InMemory, whole_experts
from megatron_resilient.mcore.checkpointing.reading import Reading, choose_together
from megatron_resilient.mcore.optimizer_state import tag_shared
from megatron_resilient.mcore.recovery.arrays import Arrays, owned, set_random_state
from megatron_resilient.mcore.recovery.old_state import prepare_moments
from megatron_resilient.mcore.recovery.progress import Progress
from megatron_resilient.mcore.recovery.refill import reseed_experts

_SHOWN = 3


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        chosen: the checkpoint, and what had to be passed over.
        step: from which training goes on; 0 for finetuning.
        bytes: read from storage, all ranks together.
        newer: experts that came from a snapshot in memory, newer than what was written.
        lost_tokens: token-expert pairs whose updates are lost, if the run goes on from here.
        lost_share: the same, of all pairs of the planned training.
    """

    chosen: Chosen
    step: int
    bytes: int
    newer: frozenset[Expert]
    lost_tokens: int = 0
    lost_share: float = 0.0


def load(
    directory: Path, contents: Contents, place: bool, memory: InMemory | None = None
) -> Loaded:
    """Loads the newest checkpoint that is whole. Collective over all ranks.

    Megatron's --finetune, --no-load-optim, --no-load-rng and --ckpt-step mean what they mean there.

    Args:
        directory: of the checkpoints.
        contents: of a model, and an optimizer that has made no step or none.
        place: give layers the placement of the checkpoint where it fits: sums keep their order.
        memory: what this rank still has of its newest save.

    Raises:
        CheckpointError: nothing there can be used; nothing has changed then.
    """
    args = get_args()
    chosen, reading = choose_together(directory, identity(args), args.ckpt_step, memory)
    manifest = chosen.manifest
    if place:
        _place(contents, manifest)
    trains = contents.optimizer is not None
    with_optimizer = trains and not (args.finetune or args.no_load_optim)
    if with_optimizer:
        prepare_moments(owned(contents.model, contents.optimizer), manifest.state["counts"])
    arrays = contents.arrays()
    target = _by_kind(arrays)
    newer, beside = _in_memory_only(reading, manifest)
    sources = _sources(reading, manifest, newer, beside)
    wanted = [
        piece
        for piece in target.pieces()
        if _is_wanted(piece.key, manifest, with_optimizer, not (args.finetune or args.no_load_rng))
    ]
    _check_types(target, wanted, manifest)
    _fill(target, wanted, sources)
    contents.show(arrays)
    progress = Progress(**manifest.state["progress"])
    if not (args.finetune or args.no_load_rng):
        _set_random(target, manifest, progress.step)
    if not args.finetune:
        if with_optimizer:
            contents.scheduler.load_state_dict(manifest.state["scheduler"])
        elif trains:
            begun = int(contents.scheduler.num_steps)
            progress = replace(progress, scheduler_steps=begun, loss_scale={})
        progress.apply(contents.optimizer, contents.scheduler)
        update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
    if dist.get_rank() == 0:
        for line in chosen.warnings():
            print(f"WARNING: {line}", flush=True)
    step = 0 if args.finetune else progress.step
    read = sum(file.bytes for file in manifest.files if file.path not in reading.from_memory)
    return Loaded(chosen, step, read, frozenset(newer))


def _place(contents: Contents, manifest: Manifest) -> None:
    """Gives layers the placement of the checkpoint where they have as many slots."""
    saved: dict[str, Holding] = manifest.state["placement"]
    for layer in contents.layers:
        holding = saved.get(str(layer.layer_number))
        if holding is None or not _fits(holding, layer.holding):
            continue
        layer.set_holding(holding)
        if contents.optimizer is None:
            continue
        for parameters in layer.parameters_by_kind().values():
            for parameter in parameters:
                tag_shared(contents.optimizer, parameter)


def _fits(saved: Holding, now: Holding) -> bool:
    return [len(slots) for slots in saved] == [len(slots) for slots in now]


def _by_kind(arrays: Arrays) -> Arrays:
    """Returns the same with an array for each kind: files need not have all kinds of a key."""
    found = Arrays()
    for key, stretches in arrays.store.items():
        for start, kinds in stretches:
            for kind, tensor in kinds.items():
                found.add(f"{key}|{kind}", start, {"value": tensor})
    return found


def _in_memory_only(
    reading: Reading, manifest: Manifest
) -> tuple[set[Expert], dict[Stretch, torch.Tensor]]:
    """Finds experts of the manifest's step that snapshots have and files have not. Collective.

    Returns:
        (the experts, what this rank has of them).
    """
    memory = reading.memory
    own = memory.beside() if memory is not None and memory.step == manifest.step else []
    told = [Stretch(*each) for each_rank in gather_json(own) for each in each_rank]
    newer = whole_experts(told, manifest.arrays) if told else set()
    wanted = [each for each in own if expert_of(each.key) in newer]
    return newer, memory.tensors(wanted) if memory is not None and wanted else {}


def _sources(
    reading: Reading,
    manifest: Manifest,
    newer: set[Expert],
    beside: dict[Stretch, torch.Tensor],
) -> Arrays:
    """Returns what this rank has of the checkpoint: read, or in memory."""
    sources = Arrays()
    for file in manifest.files:
        found = reading.contents.pop(file.path, {})
        if file.expert is None or file.expert not in newer:
            for stretch, tensor in found.items():
                sources.add(f"{stretch.key}|{stretch.kind}", stretch.start, {"value": tensor})
    for stretch, tensor in beside.items():
        sources.add(f"{stretch.key}|{stretch.kind}", stretch.start, {"value": tensor})
    reading.contents.clear()
    return sources


def _is_wanted(key: str, manifest: Manifest, with_optimizer: bool, with_random: bool) -> bool:
    array, kind = key.split("|")
    if array.startswith(("random/", "random_experts/")):
        # Streams of another device or another number of ranks are not there: they begin anew.
        return with_random and array in manifest.arrays
    return with_optimizer or kind in ("main", "value")


def _check_types(target: Arrays, wanted: list[Piece], manifest: Manifest) -> None:
    """Checks that the checkpoint has what this rank needs, before anything is changed.

    Raises:
        CheckpointError: on every rank, if any rank misses something.
    """
    wrong = []
    stops: dict[str, int] = {}
    for piece in wanted:
        stops[piece.key] = max(stops.get(piece.key, 0), piece.stop)
    for key, stop in stops.items():
        array, kind = key.split("|")
        info = manifest.arrays.get(array)
        dtype = dtype_name(target.store[key][0][1]["value"])
        if info is None or kind not in info.kinds:
            wrong.append(f"{array} ({kind}) is not in it")
        elif info.kinds[kind] != dtype:
            wrong.append(f"{array} ({kind}) is {info.kinds[kind]} there, {dtype} here")
        elif stop > info.size:
            wrong.append(f"{array} ({kind}) has {info.size} elements there, {stop} here")
    told = sorted({each for own in gather_json(wrong) for each in own})
    if told:
        more = f", and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} does not fit this model: "
            f"{'; '.join(told[:_SHOWN])}{more}"
        )


def _fill(target: Arrays, wanted: list[Piece], sources: Arrays) -> None:
    told = gather_json([socket.gethostname(), sources.pieces(), wanted])
    plan = plan_refill(
        [[Piece(*piece) for piece in held] for _, held, _ in told],
        [[Piece(*piece) for piece in needed] for _, _, needed in told],
        [host for host, _, _ in told],
    )
    assert not plan.missing, plan.missing[:_SHOWN]  # a manifest names every element once
    with torch.no_grad():
        exchange(plan.copies, sources.store, target.store)


def _set_random(target: Arrays, manifest: Manifest, step: int) -> None:
    """Continues the random streams; those of experts begin anew where their ranks are others."""
    merged_again = Arrays()
    for key, stretches in target.store.items():
        for start, kinds in stretches:
            merged_again.add(key.split("|")[0], start, kinds)
    set_random_state(merged_again)
    if random_key() in manifest.arrays:
        expert_rng.set_own_stream(merged_again.store[random_key()][0][1]["value"])
    else:
        reseed_experts(step)
