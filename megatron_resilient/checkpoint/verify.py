"""Which files of a checkpoint are not what its manifest says."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from megatron_resilient.checkpoint.data_file import DIGEST_DIFFERS, complaint, sha256_of_file
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Manifest

# Hashing is as fast as memory on a few cores; more threads would only wait for the storage.
_MAX_THREADS: Final = 16


class Damage(NamedTuple):
    """A file that cannot be used.

    Attributes:
        file: its path, relative to the checkpoint directory.
        layer: of the expert that it holds; None if it holds something else.
        expert: logical number of that expert.
        why: what is wrong.
    """

    file: str
    layer: int | None
    expert: int | None
    why: str

    @classmethod
    def of(cls, file: DataFile, why: str) -> "Damage":
        """Returns the damage of a file."""
        layer, expert = file.expert or (None, None)
        return cls(file.path, layer, expert, why)

    def __str__(self) -> str:
        what = "" if self.layer is None else f" (layer {self.layer}, expert {self.expert})"
        return f"{self.file}{what} {self.why}"


def damage(
    directory: Path,
    manifest: Manifest,
    deep: bool = True,
    files: Sequence[DataFile] | None = None,
    done: Callable[[DataFile], object] | None = None,
) -> list[Damage]:
    """Looks at the files that a manifest names: several at a time, in threads.

    Args:
        directory: the checkpoint directory.
        manifest: of the checkpoint.
        deep: hash every file; else sizes and headers only.
        files: only these of the manifest's.
        done: called with every file that was looked at, from any thread.

    Returns:
        What is damaged, in the order of the files.
    """
    chosen = manifest.files if files is None else files

    def look(file: DataFile) -> str | None:
        why = _look(directory / file.path, file, manifest.arrays, deep)
        if done is not None:
            done(file)
        return why

    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(chosen)))
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-verify") as pool:
        found = list(pool.map(look, chosen))
    return [
        Damage.of(file, why) for file, why in zip(chosen, found, strict=True) if why is not None
    ]


def _look(path: Path, file: DataFile, arrays: Mapping[str, ArrayInfo], deep: bool) -> str | None:
    why = complaint(path, file, arrays)
    if why is not None or not deep:
        return why
    try:
        return None if sha256_of_file(path) == file.sha256 else DIGEST_DIFFERS
    except OSError as error:
        return f"cannot be read: {error.strerror}"
