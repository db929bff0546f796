"""What of a checkpoint directory may go, and taking it away.

Nothing goes that a manifest that stays needs. Manifests go first, durably, and only then files that
none of the others needs, so that a collector may be killed anywhere: every manifest that is left is
as whole as it was.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint import lock
from megatron_resilient.checkpoint.data_file import complaint
from megatron_resilient.checkpoint.manifest import Manifest
from megatron_resilient.errors import CheckpointError

_MANIFEST_LEFTOVER = re.compile(r"step_([0-9]{8,})\.json\..*")
_ANY_STEP: Final = -1


@dataclass(frozen=True)
class Plan:
    """What is to go.

    Attributes:
        manifests: steps whose manifests go, the oldest first.
        kept: steps whose manifests stay, the newest first.
        files: what else goes, relative to the directory: data that no kept manifest names, and
            leftovers of saves that were not finished.
        bytes: of `files`.
        notes: why something stays that one might expect to go.
    """

    manifests: tuple[int, ...]
    kept: tuple[int, ...]
    files: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]


def plan(
    directory: Path,
    keep_last: int | None = None,
    keep_every: int | None = None,
    held: bool = True,
) -> Plan:
    """Says what may go; changes nothing.

    Args:
        directory: the checkpoint directory.
        keep_last: so many of the newest manifests stay, not counting those that miss files; at
            least one does. None: no manifest goes because of its age.
        keep_every: manifests of steps that are multiples of this stay as well.
        held: a run may be writing: saves newer than the newest manifest stay.

    Raises:
        CheckpointError: the directory is none of ours, or a number is not positive.
    """
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and number < 1:
            raise CheckpointError(f"{name} {number}: keep at least one checkpoint")
    if not places.is_ours(directory):
        raise CheckpointError(f"{directory}: is no checkpoint directory of ours")
    # Data is listed before manifests are: a save that is completed in between is seen whole.
    data, sizes = _data_files(directory)
    found: dict[int, Manifest] = {}
    notes: list[str] = []
    unreadable = _ANY_STEP
    for step in places.manifests(directory):
        try:
            found[step] = places.read_manifest(places.manifest_path(directory, step))
        except CheckpointError as error:
            unreadable = max(unreadable, step)
            notes.append(
                f"data up to step {step} stays, because nobody knows what this needs: {error}"
            )
    kept = _kept(directory, found, keep_last, keep_every)
    needed = {file.path for step in kept for file in found[step].files}
    newest = max(found, default=_ANY_STEP)

    def may_go(step: int) -> bool:
        return step > unreadable and not (held and step > newest)

    files = [path for path, step in data.items() if path not in needed and may_go(step)]
    leftovers = _manifest_leftovers(directory)
    files += [path for path, step in leftovers.items() if not (held and step > newest)]
    sizes |= {path: _size(directory / path) for path in leftovers}
    waiting = sorted({step for step in data.values() if held and step > newest})
    if waiting:
        steps = ", ".join(map(str, waiting))
        notes.append(f"data of step {steps} stays: a run may be writing it")
    return Plan(
        tuple(sorted(found.keys() - kept)),
        tuple(sorted(kept, reverse=True)),
        tuple(sorted(files)),
        sum(sizes[path] for path in files),
        tuple(notes),
    )


def collect(
    directory: Path,
    keep_last: int | None = None,
    keep_every: int | None = None,
    gone: Callable[[str], object] | None = None,
) -> Plan:
    """Takes away what may go; may be killed at any moment, and called while a run saves.

    Args:
        directory: the checkpoint directory.
        keep_last: see `plan`.
        keep_every: see `plan`.
        gone: called with the path of everything that is gone.

    Returns:
        What was planned, and is gone.

    Raises:
        CheckpointError: the directory is none of ours, a run is about to restore from it, or
            something cannot be deleted.
    """
    if not places.is_ours(directory):
        raise CheckpointError(f"{directory}: is no checkpoint directory of ours")
    with lock.collecting(directory) as holder:
        if holder is not None and holder.state == lock.STARTING:
            raise CheckpointError(
                f"{directory}: {holder} looks for what it can restore: collect when it trains"
            )
        planned = plan(directory, keep_last, keep_every, held=holder is not None)
        for step in planned.manifests:
            _delete(places.manifest_path(directory, step))
            if gone is not None:
                gone(f"{places.MANIFESTS}/{places.manifest_path(directory, step).name}")
        if planned.manifests:
            places.fsync_folder(directory / places.MANIFESTS)
        for path in planned.files:
            _delete(directory / path)
            if gone is not None:
                gone(path)
        _remove_empty(directory, holder is not None, max(planned.kept, default=_ANY_STEP))
    return planned


def _kept(
    directory: Path, found: dict[int, Manifest], keep_last: int | None, keep_every: int | None
) -> set[int]:
    if keep_last is None and keep_every is None:
        return set(found)
    kept: set[int] = set()
    whole = 0
    # Those that miss something stay if they are newer than the last one that counts: other parts
    # of them can be of use, and whoever made them may want to look.
    for step in sorted(found, reverse=True):
        if whole < (keep_last or 1):
            kept.add(step)
            whole += _is_there(directory, found[step])
        elif keep_every is not None and step % keep_every == 0:
            kept.add(step)
    return kept


def _is_there(directory: Path, manifest: Manifest) -> bool:
    return all(
        complaint(directory / file.path, file, manifest.arrays) is None for file in manifest.files
    )


def _data_files(directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns {relative path: step} and {relative path: bytes} of all in folders of saves."""
    steps: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for folder in _save_folders(directory):
        step = places.step_of_save(folder.name)
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    continue
                path = f"{places.DATA}/{folder.name}/{entry.name}"
                steps[path] = _ANY_STEP if step is None else step
                sizes[path] = _size(folder / entry.name)
    return steps, sizes


def _save_folders(directory: Path) -> list[Path]:
    with os.scandir(directory / places.DATA) as entries:
        return sorted(
            Path(entry.path)
            for entry in entries
            if places.step_of_save(entry.name) is not None and entry.is_dir(follow_symlinks=False)
        )


def _manifest_leftovers(directory: Path) -> dict[str, int]:
    """Returns {relative path: step} of unfinished and refused manifests."""
    return {
        f"{places.MANIFESTS}/{name}": int(match[1])
        for name in os.listdir(directory / places.MANIFESTS)
        if (match := _MANIFEST_LEFTOVER.fullmatch(name)) and name.endswith((".tmp", places.REFUSED))
    }


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be deleted: {error.strerror}") from error


def _remove_empty(directory: Path, held: bool, newest: int) -> None:
    for folder in _save_folders(directory):
        step = places.step_of_save(folder.name)
        if held and (step is None or step > newest):
            continue  # a save that has begun and has written nothing yet
        # Not empty: something of it is needed, or stays for a reason of its own.
        with contextlib.suppress(OSError):
            folder.rmdir()
