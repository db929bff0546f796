"""Chooses a checkpoint and reads it, all ranks together: every byte leaves storage once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilient.checkpoint import data_file
from megatron_resilient.checkpoint.choose import Chosen, Refused, Replaced, choose
from megatron_resilient.checkpoint.manifest import DataFile, Manifest, Stretch
from megatron_resilient.checkpoint.manifest_json import from_json, to_json
from megatron_resilient.checkpoint.snapshot import TORCH_DTYPES
from megatron_resilient.checkpoint.verify import Damage
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.memory import InMemory


@dataclass
class Reading:
    """What this rank has read of a checkpoint.

    Attributes:
        directory: of the checkpoints.
        memory: the newest save as it still is in this rank's memory.
        contents: {path of a file: its stretches}, of the files that this rank has read.
        from_memory: paths of files that some rank had in memory.
    """

    directory: Path
    memory: InMemory | None = None
    contents: dict[str, dict[Stretch, torch.Tensor]] = field(default_factory=dict)
    from_memory: set[str] = field(default_factory=set)


def choose_together(
    directory: Path, model: dict[str, Any], step: int | None, memory: InMemory | None
) -> tuple[Chosen, Reading]:
    """Finds the newest checkpoint that is whole. Collective over all ranks.

    Rank 0 decides; all ranks read and check their shares of the files that it asks about. What was
    read is kept, so that nothing is read twice.

    Args:
        directory: of the checkpoints.
        model: what must be equal; see `contents.identity`.
        step: the newest that may be chosen; None: any.
        memory: what this rank still has in memory; it is not read from storage.

    Raises:
        CheckpointError: there is none, or it is of another model; the same on every rank.
    """
    reading = Reading(directory, memory if memory is not None and memory.is_there else None)
    if dist.get_rank():
        return _serve(reading), reading
    try:
        chosen = choose(directory, model, check=partial(_ask, reading), step=step)
    except CheckpointError as error:
        gather_json({"error": str(error)})
        raise
    told = {"replaced": chosen.replaced, "refused": chosen.refused}
    gather_json({"manifest": to_json(chosen.manifest).decode(), "chosen": told})
    return chosen, reading


def _serve(reading: Reading) -> Chosen:
    while True:
        asked = gather_json(None)[0]
        if "error" in asked:
            raise CheckpointError(asked["error"])
        manifest = from_json(asked["manifest"].encode(), "the manifest that rank 0 chose")
        if "files" in asked:
            _read_share(reading, manifest, asked["files"])
            continue
        told = asked["chosen"]
        return Chosen(
            manifest,
            tuple(Replaced(*each) for each in told["replaced"]),
            tuple(Refused(*each) for each in told["refused"]),
        )


def _ask(reading: Reading, manifest: Manifest, files: Sequence[DataFile]) -> list[Damage]:
    paths = [file.path for file in files]
    gather_json({"manifest": to_json(manifest).decode(), "files": paths})
    return _read_share(reading, manifest, paths)


def _read_share(reading: Reading, manifest: Manifest, paths: Sequence[str]) -> list[Damage]:
    """Reads this rank's share of some files, and hears of the damage that all ranks found."""
    wanted = set(paths)
    files = [file for file in manifest.files if file.path in wanted]
    memory = reading.memory
    readers = _holders(wanted.intersection(memory.files) if memory else ())
    reading.from_memory |= readers.keys()
    load = [0] * dist.get_world_size()
    damaged = []
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        reader = readers.get(file.path)
        if reader is None:
            reader = min(range(len(load)), key=lambda rank: (load[rank], rank))
            load[reader] += file.bytes
        if reader != dist.get_rank():
            continue
        if file.path in readers:
            assert memory is not None
            reading.contents[file.path] = memory.tensors(file.stretches)
            continue
        path = reading.directory / file.path
        try:
            found = data_file.read(path, file, manifest.arrays)
        except CheckpointError as error:
            damaged.append([file.path, str(error).removeprefix(f"{path}: ")])
        else:
            reading.contents[file.path] = {
                stretch: _tensor(view, manifest.dtype(stretch)) for stretch, view in found.items()
            }
    by_path = {file.path: file for file in files}
    return [Damage.of(by_path[path], why) for told in gather_json(damaged) for path, why in told]


def _holders(own: Iterable[str]) -> dict[str, int]:
    """Returns {path: the first rank that has it in memory}. Collective."""
    told = gather_json(sorted(own))
    return {path: rank for rank in reversed(range(len(told))) for path in told[rank]}


def _tensor(view: memoryview, dtype: str) -> torch.Tensor:
    # A copy: what was read is read-only, and need not be aligned.
    return torch.frombuffer(bytearray(view), dtype=torch.uint8).view(TORCH_DTYPES[dtype])
