"""The text of a manifest.

JSON, one object: `format`, `version`, `sha256` and `manifest`, in this order and without spaces.
`sha256` is that of the bytes of the value of `manifest`, which is written canonically: keys sorted,
no spaces, ASCII. See docs/checkpoint_format.md.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from megatron_resilient.checkpoint.coverage import validate
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Manifest, Stretch
from megatron_resilient.errors import CheckpointError

FORMAT: Final = "megatron_resilient checkpoint"
VERSION: Final = 1

_HEAD = re.compile(
    rb'\{"format":"megatron_resilient checkpoint","version":([0-9]{1,9}),'
    rb'"sha256":"([0-9a-f]{64})","manifest":'
)
_TAIL: Final = b"}\n"


def to_json(manifest: Manifest) -> bytes:
    """Returns the text of the manifest's file.

    Raises:
        CheckpointError: it does not hold together, or a value is none of JSON's; says which.
    """
    name = f"manifest of step {manifest.step}"
    validate(manifest, name)
    for field in ("model", "state"):
        _check_plain(getattr(manifest, field), f"{name}: {field}")
    body = json.dumps(_to_plain(manifest), sort_keys=True, separators=(",", ":"), allow_nan=False)
    encoded = body.encode("ascii")
    head = (
        f'{{"format":"{FORMAT}","version":{VERSION},'
        f'"sha256":"{hashlib.sha256(encoded).hexdigest()}","manifest":'
    )
    return head.encode("ascii") + encoded + _TAIL


def from_json(text: bytes, name: str) -> Manifest:
    """Reads what `to_json` wrote.

    Args:
        text: the whole file.
        name: what errors call it.

    Raises:
        CheckpointError: it is damaged, of another format, or does not hold together.
    """
    head = _HEAD.match(text)
    if head is None:
        raise CheckpointError(
            f"{name}: is no manifest of ours, or damaged: it does not begin like one"
        )
    if int(head[1]) != VERSION:
        raise CheckpointError(
            f"{name}: is of version {int(head[1])}, and this program reads {VERSION}: read it "
            "with the program that wrote it"
        )
    if not text.endswith(_TAIL):
        raise CheckpointError(f"{name}: is cut short")
    body = text[head.end() : -len(_TAIL)]
    if hashlib.sha256(body).hexdigest() != head[2].decode():
        raise CheckpointError(f"{name}: is damaged: its SHA-256 is not the one it names")
    try:
        manifest = _from_plain(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: is no manifest of ours: {error!r}") from None
    validate(manifest, name)
    return manifest


def _to_plain(manifest: Manifest) -> dict[str, Any]:
    plain = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    plain["arrays"] = {
        key: {"shape": list(info.shape), "kinds": info.kinds}
        for key, info in manifest.arrays.items()
    }
    plain["files"] = [
        {
            "path": file.path,
            "step": file.step,
            "bytes": file.bytes,
            "sha256": file.sha256,
            "stretches": [list(stretch) for stretch in file.stretches],
        }
        for file in manifest.files
    ]
    return plain


def _from_plain(plain: Mapping[str, Any]) -> Manifest:
    arrays = {
        key: ArrayInfo(tuple(info["shape"]), dict(info["kinds"]))
        for key, info in plain["arrays"].items()
    }
    files = tuple(
        DataFile(
            file["path"],
            file["step"],
            file["bytes"],
            file["sha256"],
            tuple(Stretch(*stretch) for stretch in file["stretches"]),
        )
        for file in plain["files"]
    )
    return Manifest(
        plain["step"],
        plain["run"],
        plain["written"],
        plain["exact"],
        plain["model"],
        plain["state"],
        arrays,
        files,
    )


def _check_plain(value: object, name: str) -> None:
    """Checks that a value comes back from JSON as it is."""
    if isinstance(value, dict):
        for key, each in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{name}: the key {key!r} is no text: use plain values")
            _check_plain(each, f"{name}.{key}")
    elif type(value) is list:
        for place, each in enumerate(value):
            _check_plain(each, f"{name}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{name}: JSON has no number for {value}: write it as text")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{name}: is of type {type(value).__name__}: use plain values")
