"""Small checkpoints in the format of megatron_resilient.checkpoint, written as a run would."""

import hashlib
import random
from collections.abc import Collection
from pathlib import Path

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.data_file import encode
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import (
    ArrayInfo,
    DataFile,
    Expert,
    Manifest,
    Stretch,
)

LAYERS = (1, 2)
EXPERTS = 4
ALL: tuple[Expert, ...] = tuple((layer, expert) for layer in LAYERS for expert in range(EXPERTS))
MODEL = {"layers": 2, "experts": 4, "hidden": 3}
OPTIMIZED = {"main": "F32", "exp_avg": "BF16"}
DENSE = "dense/0.0/0/embedding.weight"
RANDOM = "random/0.0/cpu"


def keys_of(expert: Expert) -> list[str]:
    """The arrays of an expert."""
    return [f"expert/{expert[0]}/{expert[1]}/0/{name}" for name in ("fc1", "fc2")]


def arrays() -> dict[str, ArrayInfo]:
    """All arrays of the small model."""
    infos = {key: ArrayInfo((2, 3), dict(OPTIMIZED)) for expert in ALL for key in keys_of(expert)}
    infos[DENSE] = ArrayInfo((5, 2), dict(OPTIMIZED))
    infos[RANDOM] = ArrayInfo((7,), {"value": "U8"})
    return infos


def content(key: str, kind: str, step: int, size: int, width: int) -> bytes:
    """What an array holds after a step: the same whenever it is asked for."""
    return random.Random(f"{key} {kind} {step}").randbytes(size * width)


def write_file(directory: Path, path: str, step: int, stretches: list[Stretch]) -> DataFile:
    """Writes a data file and returns what a manifest says of it."""
    infos = arrays()
    tensors = []
    for stretch in stretches:
        info = infos[stretch.key]
        dtype = info.kinds[stretch.kind]
        width = ELEMENT_BYTES[dtype]
        whole = content(stretch.key, stretch.kind, step, info.size, width)
        part = whole[stretch.start * width : stretch.stop * width]
        tensors.append((stretch, dtype, part))
    data = encode(tensors, path)
    (directory / path).write_bytes(data)
    return DataFile(path, step, len(data), hashlib.sha256(data).hexdigest(), tuple(stretches))


def write_data(
    directory: Path, step: int, nonce: str, experts: Collection[Expert] = ALL
) -> list[DataFile]:
    """Writes the data of a save: dense state in two files, and the experts asked for."""
    places.prepare(directory)
    folder = places.create_save(directory, step, nonce)
    dense = [
        [Stretch(DENSE, kind, 0, 4) for kind in OPTIMIZED],
        [Stretch(DENSE, kind, 4, 10) for kind in OPTIMIZED] + [Stretch(RANDOM, "value", 0, 7)],
    ]
    files = [
        write_file(directory, places.dense_file(folder, 0, rank), step, stretches)
        for rank, stretches in enumerate(dense)
    ]
    for layer, expert in experts:
        path = places.expert_file(folder, layer, expert, 0, expert % 2)
        stretches = [
            Stretch(key, kind, 0, 6) for key in keys_of((layer, expert)) for kind in OPTIMIZED
        ]
        files.append(write_file(directory, path, step, stretches))
    return files


def manifest_of(
    step: int,
    files: list[DataFile],
    previous: Manifest | None = None,
    model: dict | None = None,
    run: str = "run",
) -> Manifest:
    """The manifest of a save; experts that it leaves out are those of the previous one."""
    written = {file.expert for file in files}
    older = [file for file in (previous.files if previous else ()) if file.expert not in written]
    return Manifest(
        step=step,
        run=run,
        written=1_700_000_000.0 + step,
        exact=not older,
        model=dict(model or MODEL),
        state={"iteration": step, "scheduler": {"num_steps": step * 8}},
        arrays=arrays(),
        files=(*files, *older),
    )


def save(
    directory: Path,
    step: int,
    experts: Collection[Expert] = ALL,
    previous: Manifest | None = None,
    nonce: str | None = None,
    **other: object,
) -> Manifest:
    """Makes a whole save."""
    files = write_data(directory, step, nonce or f"n{step}", experts)
    manifest = manifest_of(step, files, previous, **other)
    places.write_manifest(directory, manifest)
    return manifest


def series(directory: Path, steps: int = 4, each: int = 2) -> list[Manifest]:
    """A full save, then partial ones of some experts of each layer in turn: steps 10, 20, ..."""
    made = [save(directory, 10)]
    for number in range(1, steps):
        chosen = [
            (layer, ((number - 1) * each + place) % EXPERTS)
            for layer in LAYERS
            for place in range(each)
        ]
        made.append(save(directory, 10 * (number + 1), chosen, made[-1]))
    return made


def file_of(manifest: Manifest, expert: Expert | None) -> DataFile:
    """A file of an expert, or of the dense state."""
    return next(file for file in manifest.files if file.expert == expert)
