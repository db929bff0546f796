"""What is in a checkpoint directory, as plain values for people and programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint import lock
from megatron_resilient.checkpoint.choose import choose
from megatron_resilient.checkpoint.manifest import DataFile, Manifest
from megatron_resilient.checkpoint.verify import Damage, damage
from megatron_resilient.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """A step that has a manifest.

    Attributes:
        step: in the name of the manifest.
        path: of the manifest, relative to the directory.
        manifest: None if it cannot be read.
        why: why it cannot.
    """

    step: int
    path: str
    manifest: Manifest | None
    why: str | None


def entries(directory: Path) -> list[Entry]:
    """Returns all checkpoints of a directory, the newest first.

    Raises:
        CheckpointError: it is no checkpoint directory of ours.
    """
    if not places.is_ours(directory):
        raise CheckpointError(
            f"{directory}: is no checkpoint directory of ours: it has no {places.MANIFESTS}/ and "
            f"{places.DATA}/"
        )
    found = []
    for step in places.manifests(directory):
        path = places.manifest_path(directory, step)
        relative = f"{places.MANIFESTS}/{path.name}"
        try:
            found.append(Entry(step, relative, places.read_manifest(path), None))
        except CheckpointError as error:
            found.append(Entry(step, relative, None, str(error).removeprefix(f"{path}: ")))
    return found


def listing(directory: Path) -> dict[str, Any]:
    """Returns what `checkpoint ls --json` prints; looks at manifests only.

    Raises:
        CheckpointError: it is no checkpoint directory of ours.
    """
    held = lock.holder(directory)
    return {
        "directory": str(directory),
        "held_by": None if held is None else vars(held),
        "steps": [_listed(entry) for entry in entries(directory)],
    }


def verification(
    directory: Path,
    deep: bool = True,
    begin: Callable[[int], object] | None = None,
    done: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Returns what `checkpoint verify --json` prints; each file is looked at once.

    Args:
        directory: the checkpoint directory.
        deep: hash every file; else sizes and headers only.
        begin: called once with the bytes of all files.
        done: called with the bytes of every file that was looked at, from any thread.

    Raises:
        CheckpointError: it is no checkpoint directory of ours.
    """
    found = entries(directory)
    readable = [entry.manifest for entry in found if entry.manifest is not None]
    if begin is not None:
        begin(sum(file.bytes for file in {file for each in readable for file in each.files}))
    seen: dict[DataFile, Damage | None] = {}

    def looked_at(file: DataFile) -> None:
        if done is not None:
            done(file.bytes)

    def check(manifest: Manifest, files: Sequence[DataFile]) -> list[Damage]:
        new = [file for file in files if file not in seen]
        bad = {each.file: each for each in damage(directory, manifest, deep, new, looked_at)}
        seen.update((file, bad.get(file.path)) for file in new)
        return [each for file in files if (each := seen[file]) is not None]

    steps = [_verified(entry, check) for entry in found]
    try:
        usable = choose(directory, None, check).manifest.step
    except CheckpointError:  # that nothing is usable is the answer
        usable = None
    return {"directory": str(directory), "usable_step": usable, "steps": steps}


def _listed(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    if manifest is None:
        return {"step": entry.step, "readable": False, "why": entry.why}
    versions = manifest.experts()
    new = [file for file in manifest.files if file.step == manifest.step]
    return {
        "step": entry.step,
        "readable": True,
        "run": manifest.run,
        "written": manifest.written,
        "exact": manifest.exact,
        "experts": len(versions),
        "stale_experts": _stale(manifest),
        "oldest_step": min(versions.values(), default=manifest.step),
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files),
        "new_files": len(new),
        "new_bytes": sum(file.bytes for file in new),
    }


def _verified(
    entry: Entry, check: Callable[[Manifest, Sequence[DataFile]], list[Damage]]
) -> dict[str, Any]:
    manifest = entry.manifest
    if manifest is None:
        damaged = [Damage(entry.path, None, None, str(entry.why))]
    else:
        damaged = check(manifest, manifest.files)
    return {
        "step": entry.step,
        "complete": not damaged,
        "damaged": [each._asdict() for each in damaged],
        "experts": 0 if manifest is None else len(manifest.experts()),
        "stale_experts": 0 if manifest is None else _stale(manifest),
    }


def _stale(manifest: Manifest) -> int:
    return sum(step < manifest.step for step in manifest.experts().values())
