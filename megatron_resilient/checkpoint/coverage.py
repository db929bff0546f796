"""Whether a manifest holds together: every element of every array in exactly one file."""

import math
import re
from typing import Final

from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import Manifest, Stretch, expert_of
from megatron_resilient.errors import CheckpointError

DATA_PATH: Final = re.compile(
    r"data/step_([0-9]{8,})\.[A-Za-z0-9_-]{1,64}/[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def validate(manifest: Manifest, name: str) -> None:
    """Checks types, ranges, paths, versions and coverage. O(n log n) in stretches.

    Args:
        manifest: as read, or as about to be written.
        name: what errors call it.

    Raises:
        CheckpointError: says what is wrong and where.
    """
    try:
        _check_fields(manifest)
        for key, info in manifest.arrays.items():
            _check_array(manifest, key)
            if not info.kinds:
                raise ValueError(f"array {key} has no kinds")
        _check_files(manifest)
        _check_coverage(manifest)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _check_fields(manifest: Manifest) -> None:
    if type(manifest.step) is not int or manifest.step < 0:
        raise ValueError(f"step is {manifest.step!r}, not a number of steps")
    if type(manifest.run) is not str or not manifest.run:
        raise ValueError(f"run is {manifest.run!r}, not the id of a run")
    if type(manifest.written) not in (int, float) or not math.isfinite(manifest.written):
        raise ValueError(f"written is {manifest.written!r}, not a time")
    if type(manifest.exact) is not bool:
        raise ValueError(f"exact is {manifest.exact!r}, not true or false")
    for field in ("model", "state", "arrays"):
        if type(getattr(manifest, field)) is not dict:
            raise ValueError(f"{field} is no object")


def _check_array(manifest: Manifest, key: str) -> None:
    info = manifest.arrays[key]
    # The bar separates the parts of a tensor's name, and slashes those of a key.
    if not key or "|" in key or not key.isprintable():
        raise ValueError(f"array {key!r} has a name that cannot be")
    if key.startswith("expert/") and expert_of(key) is None:
        raise ValueError(f"array {key} is not named expert/LAYER/EXPERT/PART/PARAMETER")
    if not all(type(length) is int and length >= 0 for length in info.shape):
        raise ValueError(f"array {key} has the shape {info.shape}")
    for kind, dtype in info.kinds.items():
        if not kind or "|" in kind or not kind.isprintable():
            raise ValueError(f"array {key} has a kind {kind!r}")
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"array {key}, {kind}: {dtype!r} is no type of ours")


def _check_files(manifest: Manifest) -> None:
    seen: set[str] = set()
    for file in manifest.files:
        match = DATA_PATH.fullmatch(file.path) if type(file.path) is str else None
        if match is None:
            raise ValueError(f"{file.path!r} is no path of a data file in data/")
        if file.path in seen:
            raise ValueError(f"{file.path} is named twice")
        seen.add(file.path)
        if type(file.step) is not int or file.step != int(match[1]):
            raise ValueError(f"{file.path} is said to be of step {file.step!r}")
        if type(file.bytes) is not int or file.bytes <= 0:
            raise ValueError(f"{file.path} is said to have {file.bytes!r} bytes")
        if type(file.sha256) is not str or not _DIGEST.fullmatch(file.sha256):
            raise ValueError(f"{file.path} has no SHA-256")
        if not file.stretches:
            raise ValueError(f"{file.path} holds nothing")
        for stretch in file.stretches:
            _check_stretch(manifest, file.path, stretch)
        if len({expert_of(stretch.key) for stretch in file.stretches}) > 1:
            raise ValueError(f"{file.path} holds more than one expert")
        if file.step > manifest.step:
            raise ValueError(f"{file.path} is newer than the step {manifest.step}")
        if file.step < manifest.step and (manifest.exact or file.expert is None):
            what = "an exact checkpoint" if manifest.exact else "what is no expert"
            raise ValueError(f"{file.path} is of an older step, in {what} of step {manifest.step}")


def _check_stretch(manifest: Manifest, path: str, stretch: Stretch) -> None:
    info = manifest.arrays.get(stretch.key) if type(stretch.key) is str else None
    if info is None or type(stretch.kind) is not str or stretch.kind not in info.kinds:
        raise ValueError(f"{path} holds {stretch.key!r}, {stretch.kind!r}, which is no array")
    if type(stretch.start) is not int or type(stretch.stop) is not int:
        raise ValueError(f"{path} holds {stretch.key} from {stretch.start!r} to {stretch.stop!r}")
    if not 0 <= stretch.start < stretch.stop <= info.size:
        raise ValueError(
            f"{path} holds {stretch.key} from {stretch.start} to {stretch.stop} of {info.size}"
        )


def _check_coverage(manifest: Manifest) -> None:
    held: dict[tuple[str, str], list[tuple[int, int, str]]] = {
        (key, kind): [] for key, info in manifest.arrays.items() for kind in info.kinds
    }
    for file in manifest.files:
        for key, kind, start, stop in file.stretches:
            held[key, kind].append((start, stop, file.path))
    for (key, kind), stretches in held.items():
        reached, last = 0, ""
        for start, stop, path in sorted(stretches):
            if start > reached:
                raise ValueError(f"no file holds {key}, {kind}, from {reached} to {start}")
            if start < reached:
                raise ValueError(f"{last} and {path} both hold {key}, {kind}, from {start} on")
            reached, last = stop, path
        size = manifest.arrays[key].size
        if reached < size:
            raise ValueError(f"no file holds {key}, {kind}, from {reached} to {size}")
