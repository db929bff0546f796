"""What a restore loads: the newest checkpoint that is whole, or can be made whole."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.coverage import validate
from megatron_resilient.checkpoint.manifest import DataFile, Expert, Manifest
from megatron_resilient.checkpoint.verify import Damage, damage
from megatron_resilient.errors import CheckpointError

# Looks at files of a manifest and returns what is damaged.
Check = Callable[[Manifest, Sequence[DataFile]], list[Damage]]

_SHOWN = 4


class Replaced(NamedTuple):
    """An expert that is taken from an older save because a file of it is damaged.

    Attributes:
        layer: of the expert.
        expert: its logical number.
        from_step: the version that is damaged.
        to_step: the version that is loaded.
        why: what was damaged.
    """

    layer: int
    expert: int
    from_step: int
    to_step: int
    why: str


class Refused(NamedTuple):
    """A manifest that is passed over.

    Attributes:
        path: of the manifest.
        why: what is wrong with it, or with what it names.
    """

    path: str
    why: str


@dataclass(frozen=True)
class Chosen:
    """What to load.

    Attributes:
        manifest: every file that it names was checked. If experts were replaced, this is not what
            stands in the directory: see `adopt`.
        replaced: experts that are older than its step's checkpoint said.
        refused: newer manifests that were passed over.
    """

    manifest: Manifest
    replaced: tuple[Replaced, ...]
    refused: tuple[Refused, ...]

    def warnings(self) -> list[str]:
        """Returns a line for everything that people must hear of."""
        lines = [f"checkpoint passed over: {path}: {why}" for path, why in self.refused]
        for each in self.replaced:
            lines.append(
                f"expert {each.expert} of layer {each.layer}: the version of step "
                f"{each.from_step} is damaged, that of step {each.to_step} is loaded: {each.why}"
            )
        return lines


def choose(
    directory: Path,
    model: Mapping[str, Any] | None,
    check: Check | None = None,
    step: int | None = None,
) -> Chosen:
    """Finds what to load; changes nothing.

    The newest manifest is taken if all that it names is whole. In a partial checkpoint a damaged
    expert is replaced by the newest older version of it that is whole. Anything else that is
    damaged, and any damage in an exact checkpoint, leads to the next older manifest.

    Args:
        directory: the checkpoint directory.
        model: what the manifest's `model` must equal; None: anything.
        check: looks at files; each is given once. By default all are hashed here. If ranks share
            the work, each must call `choose` with the same manifests before it, because the
            sequence of calls follows from them.
        step: the newest that may be chosen; None: any.

    Raises:
        CheckpointError: it is of another model (says which values differ), or nothing can be used
            (says what was tried).
    """
    return _Search(directory, model, check, step).run()


def adopt(directory: Path, chosen: Chosen) -> None:
    """Makes what was chosen the newest checkpoint of the directory; durable when it returns.

    Newer manifests, which were refused, are put aside, and a manifest with replaced experts is
    written in the place of the damaged one. From then on the newest manifest is the state that the
    run goes on from, and nothing that its next partial checkpoint builds on can be collected. Only
    one process does this, and it holds the run's lock.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    for step in places.manifests(directory):
        if step > chosen.manifest.step:
            places.retire_manifest(directory, step)
    if chosen.replaced:
        places.write_manifest(directory, chosen.manifest)


def model_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], places: tuple[str, str]
) -> list[str]:
    """Returns a text for each value that differs between two models.

    Args:
        one: the `model` of a manifest.
        other: another one, or the wanted one.
        places: where the two are, as the texts say it.
    """
    told: list[str] = []
    for name in sorted(one.keys() | other.keys()):
        if name in one and name in other and one[name] == other[name]:
            continue
        shown = (repr(each[name]) if name in each else "not given" for each in (one, other))
        values = (f"{value} {place}" for value, place in zip(shown, places, strict=True))
        told.append(f"{name} is {', '.join(values)}")
    return told


class _Search:
    def __init__(
        self,
        directory: Path,
        model: Mapping[str, Any] | None,
        check: Check | None,
        newest: int | None,
    ):
        self._directory = directory
        self._model = model
        self._check = check or self._check_here
        self._steps = [
            step for step in places.manifests(directory) if newest is None or step <= newest
        ]
        self._manifests: dict[int, Manifest | CheckpointError] = {}
        self._seen: dict[DataFile, str | None] = {}  # what is wrong with it

    def run(self) -> Chosen:
        refused: list[Refused] = []
        for place, step in enumerate(self._steps):
            path = str(places.manifest_path(self._directory, step))
            manifest = self._read(step)
            if isinstance(manifest, CheckpointError):
                refused.append(Refused(path, str(manifest).removeprefix(f"{path}: ")))
                continue
            self._check_model(manifest, path)
            damaged = self._damaged(manifest, manifest.files)
            if not damaged:
                return Chosen(manifest, (), tuple(refused))
            found = self._repaired(manifest, damaged, self._steps[place + 1 :])
            if found is not None:
                return Chosen(found[0], found[1], tuple(refused))
            refused.append(Refused(path, _listing(list(damaged.items()))))
        if not refused:
            raise CheckpointError(f"{self._directory}: there is no checkpoint")
        tried = "; ".join(f"{path}: {why}" for path, why in refused)
        raise CheckpointError(f"{self._directory}: no checkpoint can be used: {tried}")

    def _read(self, step: int) -> Manifest | CheckpointError:
        if step not in self._manifests:
            try:
                path = places.manifest_path(self._directory, step)
                self._manifests[step] = places.read_manifest(path)
            except CheckpointError as error:
                self._manifests[step] = error
        return self._manifests[step]

    def _check_model(self, manifest: Manifest, path: str) -> None:
        if self._model is None:
            return
        if differences := model_differences(manifest.model, self._model, ("there", "here")):
            raise CheckpointError(
                f"{path}: is of another model: {'; '.join(differences)}. Load it into the model "
                "that it was made with, or use another folder"
            )

    def _check_here(self, manifest: Manifest, files: Sequence[DataFile]) -> list[Damage]:
        return damage(self._directory, manifest, files=files)

    def _damaged(self, manifest: Manifest, files: Sequence[DataFile]) -> dict[DataFile, str]:
        """Returns the damaged ones of some files, and why; each file is looked at once."""
        new = [file for file in files if file not in self._seen]
        if new:
            found = {each.file: each.why for each in self._check(manifest, new)}
            self._seen.update((file, found.get(file.path)) for file in new)
        return {file: why for file in files if (why := self._seen[file]) is not None}

    def _repaired(
        self, manifest: Manifest, damaged: Mapping[DataFile, str], older: Sequence[int]
    ) -> tuple[Manifest, tuple[Replaced, ...]] | None:
        """Returns a manifest with older versions of damaged experts; None if it cannot be had."""
        if manifest.exact or any(file.expert is None for file in damaged):
            return None
        versions, files = manifest.experts(), dict(manifest.files_by_expert())
        told: list[Replaced] = []
        for expert in sorted({file.expert for file in damaged if file.expert is not None}):
            found = self._older(manifest, expert, older)
            if found is None:
                return None
            files[expert] = found
            bad = [(file, why) for file, why in damaged.items() if file.expert == expert]
            to_step = min(file.step for file in found)
            told.append(Replaced(*expert, versions[expert], to_step, _listing(bad)))
        together = tuple(file for each in files.values() for file in each)
        repaired = dataclasses.replace(manifest, files=together)
        validate(repaired, f"manifest of step {manifest.step} with replaced experts")
        return repaired, tuple(told)

    def _older(
        self, manifest: Manifest, expert: Expert, older: Sequence[int]
    ) -> tuple[DataFile, ...] | None:
        for step in older:
            other = self._read(step)
            if isinstance(other, CheckpointError) or other.model != manifest.model:
                continue
            files = other.files_by_expert().get(expert, ())
            keys = {stretch.key for file in files for stretch in file.stretches}
            fits = all(manifest.arrays.get(key) == other.arrays[key] for key in keys)
            if files and fits and not self._damaged(other, files):
                return files
        return None


def _listing(damaged: Sequence[tuple[DataFile, str]]) -> str:
    told = [str(Damage.of(file, why)) for file, why in damaged[:_SHOWN]]
    more = len(damaged) - _SHOWN
    return ", ".join(told) + (f", and {more} files more" if more > 0 else "")
