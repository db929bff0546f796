"""patches.lock: what upstream looked like when the patches were written. Hashes only, no source."""

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.fingerprint import fingerprint
from megatron_resilient.patching.registry import Registry
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.target import Target

RELOCK = "megatron-resilient patches lock"
_FORMAT = 1


@dataclass(frozen=True)
class LockedSource:
    """The locked code of one target.

    Attributes:
        file: its source file, below the directory from which upstream is imported.
        line: its first line in that file, from 1.
        signature: see `Fingerprint`.
        tokens: see `Fingerprint`.
        lines: per logical line, its distance from `line` and its hash, as `12:0a1b2c3d`.
    """

    file: str
    line: int
    signature: str
    tokens: str
    lines: tuple[str, ...]

    @property
    def line_numbers(self) -> list[int]:
        """The line of the file on which each logical line starts."""
        return [self.line + int(each.partition(":")[0]) for each in self.lines]

    @property
    def line_hashes(self) -> list[str]:
        """The hash of each logical line."""
        return [each.partition(":")[2] for each in self.lines]


@dataclass(frozen=True)
class LockedTarget:
    """One target as it was locked.

    Attributes:
        upstream: the distribution that owns it.
        version: the version of it that was installed.
        source: None for a builtin, which only its version range guards.
    """

    upstream: str
    version: str
    source: LockedSource | None


@dataclass(frozen=True)
class Lock:
    """All locked targets, by name."""

    targets: Mapping[str, LockedTarget] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a lock file.

        Raises:
            PatchError: there is none, or it is damaged or of another format.
        """
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document["format"] != _FORMAT:
                raise PatchError(
                    f"{file} has format {document['format']}, not {_FORMAT}: run `{RELOCK}`"
                )
            return cls({name: _from_json(each) for name, each in document["targets"].items()})
        except FileNotFoundError as error:
            raise PatchError(f"{file} is missing: run `{RELOCK}`") from error
        except (ValueError, KeyError, TypeError) as error:
            raise PatchError(f"{file} is damaged ({error!r}): run `{RELOCK}`") from error

    def write(self, file: Path) -> None:
        """Writes the lock file: sorted, and the same text for the same content."""
        document = {
            "format": _FORMAT,
            "targets": {name: _to_json(each) for name, each in self.targets.items()},
        }
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        file.write_text(text, encoding="utf-8")

    @classmethod
    def of_installed(cls, registry: Registry, tree: SourceTree) -> Self:
        """Locks every target of the registry as it is now.

        What has no Python source is imported, to know that it is there and is a builtin.

        Raises:
            PatchError: a target does not exist, or is Python code that cannot be found in files.
        """
        locked = {}
        for name, upstream in registry.targets.items():
            version = installed_version(upstream)
            if version is None:
                raise PatchError(f"{name} cannot be locked: {upstream} is not installed")
            definition = tree.definition(Target.parse(name))
            if definition is None:
                _check_builtin(name)
                locked[name] = LockedTarget(upstream, version, None)
                continue
            now, start = fingerprint(definition), definition.first_line
            source = LockedSource(
                definition.module.relative_file,
                start,
                now.signature,
                now.tokens,
                tuple(f"{line.first - start}:{line.hash}" for line in now.lines),
            )
            locked[name] = LockedTarget(upstream, version, source)
        return cls(locked)


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _check_builtin(name: str) -> None:
    target = Target.parse(name)
    try:
        found: Any = importlib.import_module(target.module)
        for part in target.path:
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{name} does not exist: {error}") from error
    if isinstance(found, ModuleType):
        raise PatchError(f"{name} is a module; a target is a function, a class or a method")
    code = inspect.unwrap(found)
    if hasattr(code, "__code__"):
        raise PatchError(
            f"{name} is Python code that is not defined there: name the place where it is, "
            f"{code.__module__}:{code.__qualname__}"
        )


def _to_json(locked: LockedTarget) -> dict[str, Any]:
    document: dict[str, Any] = {"upstream": locked.upstream, "version": locked.version}
    if locked.source is None:
        return document | {"builtin": True}
    source = locked.source
    return document | {
        "file": source.file,
        "line": source.line,
        "signature": source.signature,
        "tokens": source.tokens,
        "lines": " ".join(source.lines),
    }


def _from_json(document: dict[str, Any]) -> LockedTarget:
    source = None
    if not document.get("builtin"):
        source = LockedSource(
            document["file"],
            document["line"],
            document["signature"],
            document["tokens"],
            tuple(document["lines"].split()),
        )
    return LockedTarget(document["upstream"], document["version"], source)
