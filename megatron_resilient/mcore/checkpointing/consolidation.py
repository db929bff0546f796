"""Makes one torch_dist checkpoint, as stock Megatron writes it, of one with a file for each expert.

Megatron itself writes it: its model and optimizer are built on the CPU from the flags of the run,
with all experts of a (pipeline, tensor) coordinate in one process, and get the state of the
checkpoint. What a model in parts does not say comes from the manifest.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.checkpointing import (
    _build_sharded_state_dict_metadata,
    generate_state_dict,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
)
from megatron.training.global_vars import set_global_variables
from megatron.training.initialize import initialize_megatron

from megatron_resilient.checkpoint import data_file
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.manifest import Manifest
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing import consolidation_flags
from megatron_resilient.mcore.checkpointing.consolidation_ranks import flags_of
from megatron_resilient.mcore.checkpointing.contents import Contents
from megatron_resilient.mcore.checkpointing.loading import load
from megatron_resilient.mcore.checkpointing.stock_form import for_both_optimizers, random_states
from megatron_resilient.mcore.experts import slot_parameters
from megatron_resilient.mcore.recovery.arrays import local_experts
from megatron_resilient.mcore.reset import reset_megatron

_SHOWN = 3


@dataclass(frozen=True)
class Consolidated:
    """What came of it; plain values.

    Attributes:
        step: of the checkpoint.
        exact: all of it is of this step.
        experts: of all layers.
        stale_experts: those whose state is of an earlier step.
        oldest_step: of an expert.
        loads_into: kinds of optimizers that find their state in it.
        warnings: a line for each thing that was passed over or replaced.
    """

    step: int
    exact: bool
    experts: int
    stale_experts: int
    oldest_step: int
    loads_into: list[str]
    warnings: list[str]

    @classmethod
    def of(cls, manifest: Manifest, warnings: list[str], distributed: bool) -> "Consolidated":
        """Describes a checkpoint that was loaded."""
        versions = list(manifest.experts().values())
        return cls(
            manifest.step,
            manifest.exact,
            len(versions),
            sum(step != manifest.step for step in versions),
            min(versions, default=manifest.step),
            ["plain", "distributed"] if distributed else ["plain"],
            warnings,
        )


def consolidate(directory: str, step: int, newest: bool, folder: str) -> dict[str, Any]:
    """Writes `folder`/iter_* and then the tracker file. Collective; one call in a process.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who this is, of as many ranks as
    `consolidation_ranks.ranks_of` says.

    Args:
        directory: of the checkpoints.
        step: of the manifest that tells the flags.
        newest: an older checkpoint serves where that one is damaged.
        folder: exists; becomes the folder of the new checkpoint.

    Returns:
        The fields of `Consolidated`.

    Raises:
        CheckpointError: nothing can be used, or it does not fit the model that the flags describe.
        ConfigError: the flags describe a model that cannot be built here.
    """
    model: list[torch.nn.Module] = []
    try:
        manifest = places.read_manifest(places.manifest_path(Path(directory), step))
        args = consolidation_flags.build(manifest)
        set_global_variables(args, build_tokenizer=False)
        initialize_megatron()
        chained = int(flags_of(manifest)["expert_model_parallel_size"]) > 1
        model, optimizer, scheduler = _built(chained)
        contents = Contents(model, optimizer, scheduler, [])
        _check_complete(contents, manifest)
        args.ckpt_step = None if newest else step
        loaded = load(Path(directory), contents, place=False)
        chosen = loaded.chosen
        if not newest and chosen.manifest.step != step:
            raise CheckpointError("; ".join(chosen.warnings()))
        _write(contents, chosen.manifest, Path(directory), Path(folder))
        distributed = bool(args.use_distributed_optimizer)
        return asdict(Consolidated.of(chosen.manifest, chosen.warnings(), distributed))
    finally:
        reset_megatron(model)


def _built(chained: bool) -> tuple[list[torch.nn.Module], Any, Any]:
    """Returns Megatron's model chunks, optimizer and scheduler.

    Args:
        chained: the run's experts have an optimizer of their own, as with expert parallelism.
    """
    args = get_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    if chained:
        config.model.pre_wrap_hooks.append(_set_experts_apart)
    # The original: the hooks around it begin a run.
    built: tuple[list[torch.nn.Module], Any, Any] = training.setup_model_and_optimizer.__wrapped__(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return built


def _set_experts_apart(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Marks experts as Megatron does with EP > 1: their optimizer's state is a part of its own."""
    for chunk in model:
        for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
            slots = len(local_experts(layer))
            for parameters in slot_parameters(layer.experts, slots).values():
                for parameter in parameters:
                    parameter.allreduce = False  # type: ignore[attr-defined]
    return model


def _check_complete(contents: Contents, manifest: Manifest) -> None:
    """Checks that the model has a place for every parameter of the checkpoint.

    Raises:
        CheckpointError: it is another one than the run's script built.
    """
    known = {key for own in gather_json(list(contents.arrays().store)) for key in own}
    rest = [
        key
        for key in sorted(manifest.arrays)
        if key not in known and key.startswith(("expert/", "dense/", "buffer/"))
    ]
    if rest:
        raise CheckpointError(
            f"the checkpoint has {', '.join(rest[:_SHOWN])}"
            f"{f' and {len(rest) - _SHOWN} arrays more' if len(rest) > _SHOWN else ''}, which the "
            "model of its flags does not have: its script builds another one"
        )


def _write(contents: Contents, manifest: Manifest, directory: Path, folder: Path) -> None:
    args = get_args()
    flags = flags_of(manifest)
    metadata = _build_sharded_state_dict_metadata(args)
    state = generate_state_dict(
        args,
        unwrap_model(contents.model),
        contents.optimizer,
        contents.scheduler,
        random_states(_random_streams(manifest, directory), flags["expert_model_parallel_size"]),
        iteration=manifest.step,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
    )
    counts = manifest.state["counts"]
    steps = counts.get("state", {}).get("step", counts.get("group", {}).get("step"))
    for_both_optimizers(state["optimizer"], bool(args.bf16 or args.fp16), steps)
    state["args"] = consolidation_flags.as_of_the_run(args, manifest)
    state["num_floating_point_operations_so_far"] = manifest.state["progress"]["flops"]
    name = get_checkpoint_name(str(folder), manifest.step, return_base_dir=True)
    if dist.get_rank() == 0:
        os.makedirs(name)
    dist.barrier()
    metadata = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(
        state,
        name,
        TorchDistSaveShardedStrategy(),
        content_metadata=metadata,
        async_strategy=args.async_strategy,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        _make_durable(Path(name))
        tracker = Path(get_checkpoint_tracker_filename(str(folder)))
        tracker.write_text(str(manifest.step), encoding="utf-8")
        places.fsync_file(tracker)
        places.fsync_folder(folder)


def _random_streams(manifest: Manifest, directory: Path) -> dict[str, torch.Tensor]:
    """Reads the random streams of all ranks: some kilobytes each."""
    keys = {key for key in manifest.arrays if key.startswith(("random/", "random_experts/"))}
    found = {key: torch.zeros(manifest.arrays[key].size, dtype=torch.uint8) for key in keys}
    for file in manifest.files:
        if not any(stretch.key in keys for stretch in file.stretches):
            continue
        for stretch, view in data_file.read(directory / file.path, file, manifest.arrays).items():
            if stretch.key in keys:
                data = torch.frombuffer(bytearray(view), dtype=torch.uint8)
                found[stretch.key][stretch.start : stretch.stop] = data
    return found


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            places.fsync_folder(path)
        else:
            places.fsync_file(path)
    places.fsync_folder(folder)
