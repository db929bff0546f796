"""One file of tensors in safetensors' format: 8 bytes of length, a JSON header, the elements.

A stretch is a flat tensor named KEY|KIND|START. The header is written and read here, not by the
safetensors package: its `serialize` copies everything once more and wants raw addresses, and in the
writer's process not a byte more than one file is to be held. The package reads these files.
"""

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Stretch
from megatron_resilient.errors import CheckpointError

Buffer = bytes | bytearray | memoryview

_PREFIX_BYTES: Final = 8
# What the safetensors package takes at most.
_MAX_HEADER_BYTES: Final = 100_000_000
_CHUNK_BYTES: Final = 1 << 22
_METADATA: Final = "__metadata__"

DIGEST_DIFFERS: Final = "its SHA-256 is not that of the manifest: bytes changed"


class Tensor(NamedTuple):
    """A tensor as the header of a file has it.

    Attributes:
        dtype: as safetensors spells it.
        shape: lengths of its dimensions.
        begin: its first byte, counted from the end of the header.
        end: one past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        tensors: by name.
        path: where in a checkpoint directory it was written to; None if it does not say.
        data_start: offset in the file of the first tensor's first byte.
    """

    tensors: dict[str, Tensor]
    path: str | None
    data_start: int


def tensor_name(stretch: Stretch) -> str:
    """Returns the name of a stretch's tensor in its file."""
    return f"{stretch.key}|{stretch.kind}|{stretch.start}"


def encode_parts(
    tensors: Iterable[tuple[Stretch, str, Buffer]], path: str | None = None
) -> list[memoryview]:
    """Returns a file's bytes as parts to be written one after the other; no element is copied.

    Args:
        tensors: (stretch, dtype in safetensors' spelling, its elements as bytes).
        path: the file's path relative to the checkpoint directory; kept in the header, so that a
            file that was put elsewhere can be told.

    Raises:
        CheckpointError: the bytes of a stretch are not as many as it has elements.
    """
    header: dict[str, Any] = {_METADATA: {"path": path}} if path is not None else {}
    # The widest elements come first, so that all are aligned, as in files of the package.
    ordered = sorted(tensors, key=lambda each: (-ELEMENT_BYTES[each[1]], tensor_name(each[0])))
    views: list[memoryview] = []
    place = 0
    for stretch, dtype, data in ordered:
        name, view = tensor_name(stretch), memoryview(data).cast("B")
        if view.nbytes != stretch.size * ELEMENT_BYTES[dtype] or name in header:
            raise CheckpointError(
                f"{path or 'a data file'}: {name} has {view.nbytes} bytes for {stretch.size} "
                f"elements of {dtype}, or is there twice"
            )
        offsets = [place, place + view.nbytes]
        header[name] = {"dtype": dtype, "shape": [stretch.size], "data_offsets": offsets}
        views.append(view)
        place += view.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(_PREFIX_BYTES, "little") + text), *views]


def encode(tensors: Iterable[tuple[Stretch, str, Buffer]], path: str | None = None) -> bytes:
    """Returns a file's bytes as one; see `encode_parts`."""
    return b"".join(encode_parts(tensors, path))


def sha256_of(parts: Iterable[Buffer]) -> str:
    """Returns the hexadecimal SHA-256 of bytes that come in parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file; holds some MiB of it at a time."""
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        digest = hashlib.sha256()
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        return digest.hexdigest()


def header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        CheckpointError: it is no whole safetensors file; says why, not which file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _parse_header(file, os.fstat(file.fileno()).st_size)


def complaint(path: Path, expected: DataFile, arrays: Mapping[str, ArrayInfo]) -> str | None:
    """Looks at size and header of a file, not at its elements.

    Args:
        path: of the file.
        expected: what the manifest says of it.
        arrays: of the manifest.

    Returns:
        What is wrong, or None.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is no file"
        size = status.st_size
        found = header(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except CheckpointError as error:
        if size != expected.bytes:
            return f"has {size} bytes, should have {expected.bytes}"
        return str(error)
    wrong = _mismatch(found, expected, arrays)
    if wrong is None and size != expected.bytes:
        wrong = f"has {size} bytes, should have {expected.bytes}"
    return wrong


def read(
    path: Path, expected: DataFile, arrays: Mapping[str, ArrayInfo], digest: bool = True
) -> dict[Stretch, memoryview]:
    """Reads a file whole, and checks it.

    Args:
        path: of the file.
        expected: what the manifest says of it.
        arrays: of the manifest.
        digest: check the SHA-256 too; without it, damage within elements goes unseen.

    Returns:
        The bytes of every stretch; all are views of one read-only block.

    Raises:
        CheckpointError: names the file and what is wrong.
    """
    if (wrong := complaint(path, expected, arrays)) is not None:
        raise CheckpointError(f"{path}: {wrong}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if digest and sha256_of([content]) != expected.sha256:
        raise CheckpointError(f"{path}: {DIGEST_DIFFERS}")
    found = _parse_header(io.BytesIO(content), len(content))
    data = memoryview(content)[found.data_start :]
    return {
        stretch: data[found.tensors[tensor_name(stretch)].begin :][
            : stretch.size * ELEMENT_BYTES[arrays[stretch.key].kinds[stretch.kind]]
        ]
        for stretch in expected.stretches
    }


def _mismatch(found: Header, expected: DataFile, arrays: Mapping[str, ArrayInfo]) -> str | None:
    if found.path is not None and found.path != expected.path:
        return f"is {found.path}, of another save or another expert"
    wanted = {tensor_name(stretch): stretch for stretch in expected.stretches}
    if missing := wanted.keys() - found.tensors.keys():
        return f"has no tensor {min(missing)}" + _more(missing)
    if unknown := found.tensors.keys() - wanted.keys():
        return f"has a tensor {min(unknown)} that the manifest does not name" + _more(unknown)
    for name, stretch in wanted.items():
        tensor, dtype = found.tensors[name], arrays[stretch.key].kinds[stretch.kind]
        if tensor.dtype != dtype:
            return f"has {name} as {tensor.dtype}, should be {dtype}"
        if tensor.shape != (stretch.size,):
            return f"has {name} in the shape {list(tensor.shape)}, should be [{stretch.size}]"
    return None


def _more(names: set[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _parse_header(file: BinaryIO, size: int) -> Header:
    broken = "is no whole safetensors file: "
    length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
    data_start = _PREFIX_BYTES + length
    if not 2 <= length <= _MAX_HEADER_BYTES or data_start > size:
        raise CheckpointError(f"{broken}it has {size} bytes, its header is said to have {length}")
    try:
        entries = json.loads(file.read(length))
        told = entries.pop(_METADATA, {})
        path = told.get("path")
        tensors = {
            str(name): Tensor(
                str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, _offsets(entry))
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{broken}its header cannot be read ({error!r})") from None
    place = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].begin):
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        width = ELEMENT_BYTES.get(tensor.dtype, 0)
        if tensor.begin != place or tensor.end - tensor.begin != elements * width:
            raise CheckpointError(f"{broken}the bytes of {name} do not fit its shape and type")
        place = tensor.end
    if data_start + place != size:
        raise CheckpointError(
            f"{broken}it has {size} bytes, its tensors end at {data_start + place}"
        )
    return Header(tensors, path if isinstance(path, str) else None, data_start)


def _offsets(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    begin, end = entry["data_offsets"]
    return begin, end
