"""What differs between two checkpoints: versions of experts, arrays, and their values."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_resilient.checkpoint.choose import model_differences
from megatron_resilient.checkpoint.data_file import read
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import DataFile, Expert, Manifest, Stretch

# What stays in memory of the other checkpoint: neighbours are mostly in one file.
_CACHED_FILES: Final = 4


class Side(NamedTuple):
    """One of the two checkpoints.

    Attributes:
        directory: that its manifest is from.
        manifest: read and checked.
    """

    directory: Path
    manifest: Manifest


class VersionChange(NamedTuple):
    """An expert that is of another step; None where it is not there."""

    layer: int
    expert: int
    first: int | None
    second: int | None


class ValueChange(NamedTuple):
    """Values of an array that differ.

    Attributes:
        key: of the array.
        kind: which of its values.
        elements: how many differ in a bit.
        max_absolute: largest difference; None if it was not asked for, or the type has none; NaN
            where only one of two values is a number.
        max_relative: largest difference divided by the larger magnitude of the two; likewise.
    """

    key: str
    kind: str
    elements: int
    max_absolute: float | None
    max_relative: float | None


@dataclass(frozen=True)
class Difference:
    """What differs; `first` and `second` are the two checkpoints.

    Attributes:
        model: texts, one for each value of `model`.
        only_first: arrays, KEY|KIND, that only the first has.
        only_second: likewise.
        types: arrays of another shape or type, a text for each.
        versions: experts of another step.
        values: arrays with other values; None if values were not compared.
    """

    model: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    types: tuple[str, ...]
    versions: tuple[VersionChange, ...]
    values: tuple[ValueChange, ...] | None

    @property
    def is_empty(self) -> bool:
        """Whether the training states are the same, as far as they were compared."""
        named = (self.model, self.only_first, self.only_second, self.types)
        # Experts of other steps may have the same values; what was compared decides.
        return not any(named) and not (self.versions if self.values is None else self.values)


def difference(
    first: Side,
    second: Side,
    values: bool = True,
    sizes: bool = False,
    done: Callable[[DataFile], object] | None = None,
) -> Difference:
    """Compares two checkpoints, however they are cut into files.

    A file that both name, with one digest, is not read. Holds a few files in memory.

    Args:
        first: a checkpoint.
        second: another one.
        values: compare values, bit by bit; else versions, shapes and types only.
        sizes: also say by how much they differ.
        done: called with every file of the first that was compared.

    Raises:
        CheckpointError: a file is damaged.
    """
    one, other = first.manifest, second.manifest
    named, also = _kinds(one), _kinds(other)
    types = [
        f"{key}|{kind}: {_shown(named[key, kind])}, {_shown(also[key, kind])}"
        for key, kind in sorted(named.keys() & also.keys())
        if named[key, kind] != also[key, kind]
    ]
    alike = {each for each in named.keys() & also.keys() if named[each] == also[each]}
    return Difference(
        tuple(model_differences(one.model, other.model, ("in the first", "in the second"))),
        tuple(f"{key}|{kind}" for key, kind in sorted(named.keys() - also.keys())),
        tuple(f"{key}|{kind}" for key, kind in sorted(also.keys() - named.keys())),
        tuple(types),
        tuple(_version_changes(one.experts(), other.experts())),
        tuple(_value_changes(first, second, alike, sizes, done)) if values else None,
    )


def _kinds(manifest: Manifest) -> dict[tuple[str, str], tuple[tuple[int, ...], str]]:
    return {
        (key, kind): (info.shape, dtype)
        for key, info in manifest.arrays.items()
        for kind, dtype in info.kinds.items()
    }


def _shown(what: tuple[tuple[int, ...], str]) -> str:
    return f"{what[1]} {list(what[0])}"


def _version_changes(one: dict[Expert, int], other: dict[Expert, int]) -> list[VersionChange]:
    return [
        VersionChange(*expert, one.get(expert), other.get(expert))
        for expert in sorted(one.keys() | other.keys())
        if one.get(expert) != other.get(expert)
    ]


def _value_changes(
    first: Side,
    second: Side,
    alike: set[tuple[str, str]],
    sizes: bool,
    done: Callable[[DataFile], object] | None,
) -> list[ValueChange]:
    places: dict[tuple[str, str], list[tuple[Stretch, DataFile]]] = {}
    for file in second.manifest.files:
        for stretch in file.stretches:
            places.setdefault((stretch.key, stretch.kind), []).append((stretch, file))
    load = functools.lru_cache(maxsize=_CACHED_FILES)(
        lambda file: read(second.directory / file.path, file, second.manifest.arrays)
    )
    totals: dict[tuple[str, str], _Total] = {}
    same_files = set(second.manifest.files)
    for file in first.manifest.files:
        wanted = [each for each in file.stretches if (each.key, each.kind) in alike]
        if wanted and file not in same_files:
            content = read(first.directory / file.path, file, first.manifest.arrays)
            for mine in wanted:
                dtype = first.manifest.dtype(mine)
                for theirs, other_file in places[mine.key, mine.kind]:
                    start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
                    if start >= stop:
                        continue
                    left = _cut(content[mine], mine, start, stop, dtype)
                    right = _cut(load(other_file)[theirs], theirs, start, stop, dtype)
                    if left != right:
                        total = totals.setdefault((mine.key, mine.kind), _Total())
                        total.add(left, right, dtype, sizes)
        if done is not None:
            done(file)
    return [
        ValueChange(key, kind, total.elements, total.max_absolute, total.max_relative)
        for (key, kind), total in sorted(totals.items())
    ]


def _cut(data: memoryview, stretch: Stretch, start: int, stop: int, dtype: str) -> memoryview:
    width = ELEMENT_BYTES[dtype]
    return data[(start - stretch.start) * width : (stop - stretch.start) * width]


class _Total:
    """What was found of one array so far."""

    def __init__(self) -> None:
        self.elements = 0
        self.max_absolute: float | None = None
        self.max_relative: float | None = None

    def add(self, left: memoryview, right: memoryview, dtype: str, sizes: bool) -> None:
        """Adds two pieces that differ."""
        import numpy as np

        bits = np.dtype(f"u{ELEMENT_BYTES[dtype]}")
        self.elements += int((np.frombuffer(left, bits) != np.frombuffer(right, bits)).sum())
        if not sizes:
            return
        # Not every pattern of bits is a number, and that is no reason to warn.
        with np.errstate(all="ignore"):
            one, other = _numbers(left, dtype), _numbers(right, dtype)
            if one is None or other is None:
                return
            absolute = np.abs(one - other)
            absolute[one == other] = 0.0
            larger = np.maximum(np.abs(one), np.abs(other))
            relative = np.where(absolute == 0, 0.0, absolute / larger)
        self.max_absolute = _larger(self.max_absolute, float(absolute.max()))
        self.max_relative = _larger(self.max_relative, float(relative.max()))


def _larger(before: float | None, value: float) -> float:
    if before is None or math.isnan(value):
        return value
    return before if math.isnan(before) else max(before, value)


def _numbers(data: memoryview, dtype: str) -> Any:
    """Returns an array of float64; None for a type that numpy does not have."""
    import numpy as np

    if dtype == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(float)
    codes = {"F": "f", "I": "i", "U": "u"}
    if dtype.startswith("F8") or dtype[0] not in codes:
        return None
    return np.frombuffer(data, f"<{codes[dtype[0]]}{ELEMENT_BYTES[dtype]}").astype(float)
