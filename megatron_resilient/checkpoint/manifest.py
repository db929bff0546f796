"""What a checkpoint is: a manifest says which file holds which stretch of the training state."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

# (layer, logical expert)
Expert = tuple[int, int]

_EXPERT_KEY = re.compile(r"expert/([0-9]+)/([0-9]+)/[0-9]+/.+")


class Stretch(NamedTuple):
    """A stretch of one flat array.

    Attributes:
        key: name of the array, the same in every world.
        kind: which of the array's values: main, exp_avg, exp_avg_sq, value, ...
        start: first element.
        stop: one past the last element.
    """

    key: str
    kind: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class DataFile:
    """A file of tensors.

    Attributes:
        path: relative to the checkpoint directory, with slashes.
        step: the training step whose state it has.
        bytes: its size.
        sha256: of the whole file, hexadecimal.
        stretches: what it holds: of one expert, or nothing of any.
    """

    path: str
    step: int
    bytes: int
    sha256: str
    stretches: tuple[Stretch, ...]

    @property
    def expert(self) -> Expert | None:
        """(layer, expert) of an expert's file, None for another one."""
        return expert_of(self.stretches[0].key)


@dataclass(frozen=True)
class ArrayInfo:
    """What an array is.

    Attributes:
        shape: of the parameter; the flat array has as many elements.
        kinds: {kind: dtype}, in safetensors' spelling: F32, BF16, U8, I64, ...
    """

    shape: tuple[int, ...]
    kinds: dict[str, str]

    @property
    def size(self) -> int:
        """Elements of each kind."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """One checkpoint: the files that together hold every element of the training state once.

    Attributes:
        step: training step after which it was taken.
        run: id of the run that wrote it.
        written: Unix time in seconds.
        exact: all of it is of this step; else some experts may be of earlier ones.
        model: what must be equal in a model that loads it; plain values.
        state: whatever else belongs to the training state; plain values, opaque here.
        arrays: {key: what the array is}.
        files: of this save, and of earlier saves for what this one left out.
    """

    step: int
    run: str
    written: float
    exact: bool
    model: dict[str, Any]
    state: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    files: tuple[DataFile, ...]

    def experts(self) -> dict[Expert, int]:
        """Returns {(layer, expert): step}, the oldest of what the expert is made of."""
        versions: dict[Expert, int] = {}
        for file in self.files:
            if (expert := file.expert) is not None:
                versions[expert] = min(file.step, versions.get(expert, file.step))
        return dict(sorted(versions.items()))

    def files_by_expert(self) -> dict[Expert | None, tuple[DataFile, ...]]:
        """Returns the files of each expert, and under None those of everything else."""
        files: dict[Expert | None, list[DataFile]] = {}
        for file in self.files:
            files.setdefault(file.expert, []).append(file)
        return {expert: tuple(each) for expert, each in files.items()}

    def dtype(self, stretch: Stretch) -> str:
        """Returns the type of a stretch's elements."""
        return self.arrays[stretch.key].kinds[stretch.kind]


@functools.lru_cache(maxsize=1 << 16)
def expert_of(key: str) -> Expert | None:
    """Returns (layer, expert) of an expert's array, None for another one."""
    match = _EXPERT_KEY.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]))
