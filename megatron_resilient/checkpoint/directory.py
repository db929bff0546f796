"""Where the files of a checkpoint directory are, and how they become durable.

D/manifests/step_00000120.json       there only when all that it names is durable
D/data/step_00000120.NONCE/...       the files of one attempt at a save
D/lock                               see lock.py
"""

import os
import re
from pathlib import Path
from typing import Final

from megatron_resilient.checkpoint.manifest import DataFile, Manifest
from megatron_resilient.checkpoint.manifest_json import from_json, to_json
from megatron_resilient.errors import CheckpointError
from megatron_resilient.telemetry.atomic import write_text_atomically

MANIFESTS: Final = "manifests"
DATA: Final = "data"
LOCK: Final = "lock"
# Ending of a manifest that a restore passed over; nobody reads it any more.
REFUSED: Final = ".refused"

_MANIFEST = re.compile(r"step_([0-9]{8,})\.json")
_NONCE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SAVE_FOLDER = re.compile(r"step_([0-9]{8,})\.[A-Za-z0-9_-]{1,64}")


def manifest_path(directory: Path, step: int) -> Path:
    """Returns the path of a step's manifest."""
    return directory / MANIFESTS / f"step_{step:08d}.json"


def save_folder(step: int, nonce: str) -> str:
    """Returns the path, relative to the directory, of the data of one attempt at a save.

    Raises:
        CheckpointError: the nonce is not 1 to 64 letters, digits, - or _.
    """
    if not _NONCE.fullmatch(nonce):
        raise CheckpointError(f"nonce {nonce!r}: use 1 to 64 letters, digits, - and _")
    return f"{DATA}/step_{step:08d}.{nonce}"


def expert_file(folder: str, layer: int, expert: int, part: int, writer: int) -> str:
    """Returns the relative path of a file of an expert.

    Args:
        folder: of the save.
        layer: number of its layer.
        expert: its logical number.
        part: its expert tensor parallel part.
        writer: rank that writes; several may write pieces of one part.
    """
    return f"{folder}/expert.L{layer:03d}.E{expert:03d}.P{part}.W{writer:04d}.safetensors"


def dense_file(folder: str, unit: int, writer: int) -> str:
    """Returns the relative path of a file of anything else.

    Args:
        folder: of the save.
        unit: number that tells it from the writer's other files.
        writer: rank that writes.
    """
    return f"{folder}/dense.U{unit:04d}.W{writer:04d}.safetensors"


def step_of_save(name: str) -> int | None:
    """Returns the step of a save's folder in data/ by its name, None if it is none of ours."""
    match = _SAVE_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def is_ours(directory: Path) -> bool:
    """Whether this is a checkpoint directory of this format, with or without a checkpoint."""
    return (directory / MANIFESTS).is_dir() and (directory / DATA).is_dir()


def prepare(directory: Path) -> None:
    """Creates the directory and its folders where they are missing; they are durable afterwards.

    Raises:
        CheckpointError: it cannot be done; says where.
    """
    try:
        for folder in (directory, directory / MANIFESTS, directory / DATA):
            folder.mkdir(parents=True, exist_ok=True)
            fsync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be prepared: {_reason(error)}") from error


def create_save(directory: Path, step: int, nonce: str) -> str:
    """Creates the folder of one attempt at a save; every rank may call it.

    Returns:
        Its path relative to the directory.

    Raises:
        CheckpointError: it cannot be created; says where.
    """
    folder = save_folder(step, nonce)
    try:
        (directory / folder).mkdir(exist_ok=True)
        fsync_folder(directory / DATA)
    except OSError as error:
        raise CheckpointError(
            f"{directory / folder}: cannot be created: {_reason(error)}"
        ) from error
    return folder


def manifests(directory: Path) -> list[int]:
    """Returns the steps that have a manifest, whole or not, the newest first; [] if none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return sorted((step for step, _ in _manifest_files(directory)), reverse=True)


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Makes a checkpoint visible: whole and durable, or not at all.

    Before that it looks whether all files that it names are there in their sizes: a mistake, or a
    folder that vanished, must not become a checkpoint.

    Returns:
        The path of the manifest. One of the same step is replaced.

    Raises:
        CheckpointError: it does not hold together, a file is not there, or it cannot be written;
            what was there before is as it was.
    """
    text = to_json(manifest)
    for file in manifest.files:
        _check_there(directory, file)
    path = manifest_path(directory, manifest.step)
    try:
        write_text_atomically(path, text.decode("ascii"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {_reason(error)}") from error
    return path


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest and checks all of it.

    Raises:
        CheckpointError: it is missing, damaged, or of another step than its name says.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error
    manifest = from_json(text, str(path))
    match = _MANIFEST.fullmatch(path.name)
    if match is not None and int(match[1]) != manifest.step:
        raise CheckpointError(f"{path}: holds the manifest of step {manifest.step}")
    return manifest


def retire_manifest(directory: Path, step: int) -> None:
    """Takes a manifest out of use, durably: `manifests` lists it no longer.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    path = manifest_path(directory, step)
    try:
        path.replace(path.with_name(path.name + REFUSED))
        fsync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be renamed: {_reason(error)}") from error


def fsync_file(path: Path) -> None:
    """Waits until a file's content is durable."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """Waits until the names in a folder are durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_files(directory: Path) -> list[tuple[int, Path]]:
    folder = directory / MANIFESTS
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {_reason(error)}") from error
    found = []
    for name in names:
        match = _MANIFEST.fullmatch(name)
        # One step, one name: others would be listed twice and found nowhere.
        if match is not None and manifest_path(directory, int(match[1])).name == name:
            found.append((int(match[1]), folder / name))
    return found


def _check_there(directory: Path, file: DataFile) -> None:
    path = directory / file.path
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: a manifest is to name it, but: {_reason(error)}") from error
    if size != file.bytes:
        raise CheckpointError(
            f"{path}: a manifest is to name it with {file.bytes} bytes, but it has {size}"
        )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
