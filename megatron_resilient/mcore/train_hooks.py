"""What runs around Megatron's own functions while it trains: the bodies of the `core` patches."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_model_config
from megatron.training import get_args, print_rank_0
from torch.distributed.checkpoint.api import CheckpointException

from megatron_resilient.checkpoint.directory import manifest_path
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.config import config_from_args
from megatron_resilient.errors import CheckpointError, ResilientError
from megatron_resilient.mcore import (
    layer_hooks,
    load_failure,
    placement_file,
    replicas,
    specs,
    uneven,
)
from megatron_resilient.mcore.checkpointing import find, signals
from megatron_resilient.mcore.checkpointing import run as checkpoints
from megatron_resilient.mcore.checkpointing.contents import Contents
from megatron_resilient.mcore.checkpointing.saves import Saved
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.overlap import setup as overlap
from megatron_resilient.mcore.overlap.auto import AutoOverlap
from megatron_resilient.mcore.rebalance import Rebalancer
from megatron_resilient.mcore.recovery import faults, rejoin, session, steps
from megatron_resilient.mcore.recovery.progress import Progress
from megatron_resilient.mcore.replica_arguments import memory_table
from megatron_resilient.mcore.replica_check import check_replicas
from megatron_resilient.mcore.replica_gradients import sum_gradients_of
from megatron_resilient.mcore.run_record import RunRecord
from megatron_resilient.patching import apply

_record: RunRecord | None = None
_replicas: "_ReplicaHooks | None" = None
_overlap: AutoOverlap | None = None
_load_seconds = 0.0  # of the last load, which ends before the record begins
_load_facts: dict[str, Any] = {}  # what else is to be recorded of one of a per-expert checkpoint


def record() -> RunRecord | None:
    """Returns the record of the run in progress, None before the model is built."""
    return _record


def close(exit_code: int) -> None:
    """Ends the record of the run in progress, if there is one, and saves that are on their way.

    After an orderly end nothing is on its way any more.
    """
    global _record
    layer_hooks.set_built(False)
    checkpoints.abandon()
    if _record is not None:
        _record.end(exit_code)
        _record = None


def forget() -> None:
    """Drops the record without ending it: the same run goes on, or its end is written already."""
    global _record, _replicas, _overlap
    layer_hooks.set_built(False)
    checkpoints.abandon()
    if session.current() is None:
        checkpoints.close()
    _replicas = _overlap = None
    if _record is not None:
        _record.log.close()
        _record = None


def setup(original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Runs `setup_model_and_optimizer`; before it ranks compare patches, after it recording starts.

    Raises:
        PatchError: ranks run different patches or upstream code.
    """
    global _record, _replicas, _overlap, _load_facts
    _check_same_patches()
    elastic = session.current()
    _load_facts = {}
    rejoined = None
    own_format = _saves_experts()
    if own_format:
        config = config_from_args(get_args()).checkpoint
        checkpoints.open_storage(Path(get_args().save), config, goes_on=elastic is not None)
        signals.listen()
    if elastic is None:
        built = original(*args, **kwargs)
    else:
        built, rejoined = rejoin.build(elastic, original, *args, **kwargs)
    model, optimizer, scheduler = built
    specs.check_built(model)
    overlap.connect(model, config_from_args(get_args()).overlap)
    layer_hooks.set_built(True)
    uneven.attach(model)
    _record = RunRecord.start(model, elastic.world if elastic else None)
    _replicas = _ReplicaHooks.attach(model, optimizer, rejoined)
    if optimizer is not None:
        _overlap = AutoOverlap.attach(model, config_from_args(get_args()).overlap)
    if _replicas is not None:
        _record.replicated = _replicas.layers
        _record.placed()
    if get_args().iteration and rejoined is None:
        _record.loaded(_load_seconds, **_load_facts)
    elif _load_facts:  # the recovery's own event says what tokens are lost
        facts = {k: v for k, v in _load_facts.items() if k != "lost_expert_tokens"}
        _record.loaded(_load_seconds, **facts)
    if own_format and rejoined is None:
        checkpoints.refuse_later_saves(get_args().iteration)
    if own_format and optimizer is not None:
        layers = replicas.replicated_layers(model)
        checkpoints.begin(model, optimizer, scheduler, layers, config, _record_save)
    if elastic is not None:
        elastic.begin(built, rejoined)
        if _replicas is not None:
            elastic.live.staged = _replicas.rebalancer.staged
    return built


def train_step(original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Runs one training step and records it, unless it ends training before the optimizer steps."""
    start = time.perf_counter()
    elastic, replayed = session.current(), None
    if _overlap is not None:
        _overlap.before_step()
    if elastic is not None:
        inner = partial(uneven.train_step, original)
        result, replayed = steps.train_step(elastic, inner, *args, **kwargs)
    else:
        result = uneven.train_step(original, *args, **kwargs)
    checkpoints.wait_for_copy()  # experts may move next
    seconds = replayed.seconds if replayed else time.perf_counter() - start
    should_exit = result[3]
    if _record is not None and not should_exit:
        # Steps may have been skipped in between (--iterations-to-skip): they never come here.
        _record.step = kwargs.get("iteration", _record.step)
        optimizer = args[3] if len(args) > 3 else kwargs["optimizer"]
        _record.after_step(seconds, result, _learning_rate(optimizer), replayed is not None)
        if _replicas is not None and replayed is None:
            moved = _replicas.after_step(_record, seconds)
            if moved and _overlap is not None:
                _overlap.soon()
        if _overlap is not None:
            _overlap.after_step(_record.write if _record.speaks_for_stage else None)
        if elastic is not None:
            steps.recorded(elastic, _record, _replicas.rebalancer.loads if _replicas else {})
    return result


def evaluate(original: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Evaluates on the validation or the test set, and records the losses."""
    faults.point("evaluate")
    result = uneven.evaluate(original, *args, **kwargs)
    losses = result[0]  # None: the time was up before it ended; empty: not the last stage
    if _record is not None and losses:
        _record.evaluated(losses)
    return result


def save_checkpoint(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Saves; how long training stood still for it goes into the record."""
    if _record is None:
        return original(iteration, *args, **kwargs)
    if checkpoints.is_open():
        faults.point("save")
        optimizer, scheduler, flops = args[1:4]
        path = checkpoints.save(iteration, _progress(iteration, optimizer, scheduler, flops))
        if _record.speaks:
            _record.write("checkpoint_save_start", path=path, asynchronous=True)
        return None
    _record.save_started(iteration)
    faults.point("save")
    result = original(iteration, *args, **kwargs)
    if _replicas is not None and _record.speaks_for_stage:
        placement_file.write(_iteration_folder(get_args().save, iteration), _replicas.layers)
    _record.save_returned()
    return result


def finalize_async_save(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Finalizes asynchronous saves that are complete, and records them."""
    if kwargs.get("blocking", args[0] if args else False):
        checkpoints.finish()
    else:
        checkpoints.poll()
    original(*args, **kwargs)
    if _record is not None:
        _record.saves_finalized()


def load_checkpoint(original: Callable[..., tuple[int, int]], *args: Any, **kwargs: Any) -> tuple:
    """Loads.

    Raises:
        CheckpointError: what is there is not this model's, or damaged; one line.
    """
    global _load_seconds, _load_facts
    folder = get_args().load or get_args().pretrained_checkpoint
    start, _load_facts = time.perf_counter(), {}
    try:
        ours = find.folder_of_ours(get_args())
        result = _load_experts(ours, *args) if ours is not None else original(*args, **kwargs)
    except ResilientError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        why = load_failure.reason(error, get_args(), folder)
        raise CheckpointError(
            f"--load {folder}: the checkpoint cannot be loaded into this model: {why}"
        ) from error
    _load_seconds = time.perf_counter() - start
    return result


def _saves_experts() -> bool:
    config = config_from_args(get_args()).checkpoint
    # An evaluation changes nothing in the folder.
    saves = bool(get_args().save) and not get_args().skip_train
    return saves and config.checkpoint_format == "experts"


def _load_experts(folder: Path, model: list, optimizer: Any, scheduler: Any, *_: Any) -> tuple:
    layers = replicas.replicated_layers(model)
    contents = Contents(model, optimizer, scheduler, layers)
    global _load_facts
    loaded = checkpoints.load_into(folder, contents, goes_back=not rejoin.overlays())
    _load_facts = {
        "path": str(manifest_path(folder, loaded.chosen.manifest.step)),
        "bytes": loaded.bytes,
        "lost_expert_tokens": loaded.lost_tokens,
        "lost_share": loaded.lost_share,
        "replaced_experts": [list(each[:4]) for each in loaded.chosen.replaced],
    }
    return loaded.step, loaded.chosen.manifest.state["progress"]["flops"]


def _progress(step: int, optimizer: Any, scheduler: Any, flops: float) -> dict[str, Any]:
    elastic = session.current()
    if elastic is not None and elastic.live is not None:
        progress = elastic.live.progress.with_evaluations()
    else:
        progress = replace(Progress.now(optimizer, scheduler), step=step, flops=float(flops))
    return progress.to_json()


def _record_save(saved: Saved) -> None:
    if _record is None or not _record.speaks:
        return
    if saved.failed is not None:
        _record.write("checkpoint_failed", path=saved.path, why=saved.failed)
        return
    _record.write(
        "checkpoint_saved",
        path=saved.path,
        seconds=saved.seconds,
        stall_seconds=saved.stall_seconds,
        bytes=saved.bytes,
        asynchronous=True,
    )


@dataclass(frozen=True)
class _ReplicaHooks:
    """What replicated layers need between steps."""

    layers: list[ReplicatedMoELayer]
    rebalancer: Rebalancer
    check_interval: int

    @classmethod
    def attach(
        cls, model: list[torch.nn.Module], optimizer: Any, rejoined: "rejoin.Rejoined | None"
    ) -> "_ReplicaHooks | None":
        layers = replicas.replicated_layers(model)
        if not layers or optimizer is None:
            return None
        config = config_from_args(get_args()).replicas
        late = sum_gradients_of(layers, model, get_model_config(model[0]))
        if rejoined is None:
            print_rank_0("\n".join(memory_table(get_args(), config)))
            if late is not None:
                print_rank_0(f"replicas' gradients are summed after the backward pass: {late}")
        rebalancer = Rebalancer(model, layers, optimizer, config)
        if rejoined is not None:
            rebalancer.loads = dict(rejoined.loads or {})
        elif get_args().iteration and not _load_facts:
            folder = _iteration_folder(get_args().load, get_args().iteration)
            saved = placement_file.read(folder, layers)
            rebalancer.adopt(saved or [layer.holding for layer in layers])
        return cls(layers, rebalancer, config.check_replicas_interval)

    def after_step(self, record: RunRecord, seconds: float) -> bool:
        """Rebalances if it is time; returns whether experts were moved."""
        move = self.rebalancer.after_step(record.step, seconds)
        if move is not None:
            record.rebalanced(move)
        if self.check_interval and record.step % self.check_interval == 0:
            check_replicas(self.layers)
        return move is not None


def _iteration_folder(folder: str, iteration: int) -> str:
    return os.path.join(folder, f"iter_{iteration:07d}")


def _check_same_patches() -> None:
    apply.check_same_digest(gather_json(apply.applied_digest()))


def _learning_rate(optimizer: Any) -> float | None:
    """Returns what Megatron logs: the rate for which the scheduler stands after the step."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return None if rate is None else float(rate)
