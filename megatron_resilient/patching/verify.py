"""Compares installed upstream code with patches.lock. Reads files; imports no upstream."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from megatron_resilient.patching.fingerprint import Fingerprint, fingerprint
from megatron_resilient.patching.lock import Lock, LockedTarget, installed_version
from megatron_resilient.patching.registry import GROUPS, Patch, Registry, Reliance
from megatron_resilient.patching.source import Definition, SourceTree
from megatron_resilient.patching.target import Target

State = Literal["ok", "drifted", "missing", "unlocked"]


@dataclass(frozen=True)
class Finding:
    """What verification says about one patch or reliance.

    Attributes:
        subject: the declaration.
        state: `ok`; `drifted`, the code or the version is another one; `missing`, upstream or the
            name is not there; `unlocked`, patches.lock does not know the name.
        detail: one line, empty if ok.
        version: the installed version of the upstream, None if there is none.
        definition: the code as installed; None for a builtin and for what is missing.
        fingerprint: that of `definition`.
        locked: the code as locked.
    """

    subject: Patch | Reliance
    state: State
    detail: str = ""
    version: str | None = None
    definition: Definition | None = None
    fingerprint: Fingerprint | None = None
    locked: LockedTarget | None = None

    @property
    def name(self) -> str:
        """The id of a patch, the target of a reliance: what `allow_drift` names."""
        return self.subject.id if isinstance(self.subject, Patch) else self.subject.target


def verify(
    registry: Registry, lock: Lock, tree: SourceTree, groups: Collection[str] = GROUPS
) -> tuple[Finding, ...]:
    """Returns one finding per patch of `groups` and per reliance, in order of declaration."""
    subjects: list[Patch | Reliance] = [p for p in registry.patches if p.group in groups]
    versions = {name: installed_version(name) for name in registry.upstreams}
    return tuple(
        _examine(each, versions[each.upstream], lock, tree)
        for each in (*subjects, *registry.reliances)
    )


def _examine(
    subject: Patch | Reliance, version: str | None, lock: Lock, tree: SourceTree
) -> Finding:
    if version is None:
        return Finding(subject, "missing", f"{subject.upstream} is not installed")
    definition = tree.definition(Target.parse(subject.target))
    now = fingerprint(definition) if definition is not None else None
    locked = lock.targets.get(subject.target)
    state, detail = _compare(locked, now)
    if (
        state == "ok"
        and isinstance(subject, Patch)
        and not SpecifierSet(subject.versions).contains(version, prereleases=True)
    ):
        state = "drifted"
        detail = f"{subject.upstream} {version} is outside {subject.versions}"
    return Finding(subject, state, detail, version, definition, now, locked)


def _compare(locked: LockedTarget | None, now: Fingerprint | None) -> tuple[State, str]:
    if locked is None:
        return "unlocked", "not in patches.lock"
    since = f"{locked.upstream} {locked.version}"
    if locked.source is None:
        return ("ok", "") if now is None else ("drifted", f"was a builtin in {since}")
    if now is None:
        return "missing", f"was in {locked.source.file} of {since}"
    if now.signature != locked.source.signature:
        return "drifted", f"signature and code changed since {since}"
    if now.tokens != locked.source.tokens:
        return "drifted", f"code changed since {since}"
    return "ok", ""
