"""Applies patches, all or none, and takes them back."""

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_resilient.errors import PatchDriftError, PatchError
from megatron_resilient.patching.changes import Changes
from megatron_resilient.patching.lock import Lock
from megatron_resilient.patching.registry import GROUPS, Registry
from megatron_resilient.patching.report import drift_message, summary
from megatron_resilient.patching.sites import Site
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.target import Target
from megatron_resilient.patching.verify import Finding, verify

PATCHES_PACKAGE = "megatron_resilient.patches"
ALLOW_DRIFT_VARIABLE = "MEGATRON_RESILIENT_ALLOW_DRIFT"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppliedSet:
    """The patches that are in force.

    Attributes:
        groups: in the order in which they were applied.
        ids: of the patches, in the order in which they were applied.
        digest: see `applied_digest`.
        allowed_drift: names of patches and reliances that drifted and were let through.
    """

    groups: tuple[str, ...]
    ids: tuple[str, ...]
    digest: str
    allowed_drift: tuple[str, ...]


@dataclass(frozen=True)
class _Active:
    applied: AppliedSet
    changes: Changes


_active: _Active | None = None
# What Megatron's modules imported from one another while patches were in force. Those modules stay
# loaded after disable(), so the next enable() has to reach them.
_late_aliases: list[Site] = []


def enable(
    groups: Iterable[str],
    *,
    allow_drift: Collection[str] = (),
    registry: Registry | None = None,
    lock: Lock | None = None,
) -> AppliedSet:
    """Verifies upstream against patches.lock, then applies all patches of `groups`, or none.

    Call it before the first import of Megatron. A second call with the same groups changes nothing.

    Args:
        groups: of `registry.GROUPS`; they are applied in that order.
        allow_drift: patch ids (or targets of reliances) whose drift is accepted, besides those in
            the environment variable MEGATRON_RESILIENT_ALLOW_DRIFT, separated by commas.
        registry: default: all patches of this package.
        lock: default: the patches.lock beside them.

    Raises:
        PatchDriftError: upstream code, or its version, is not what the patches were written for.
        PatchError: upstream is not installed, a patch cannot be applied, an alias is undeclared,
            or other groups are enabled.
    """
    global _active
    asked = set(groups)
    wanted = tuple(group for group in GROUPS if group in asked)
    if unknown := asked.difference(GROUPS):
        raise PatchError(f"unknown patch group {min(unknown)!r}, not in {', '.join(GROUPS)}")
    if _active is not None:
        if _active.applied.groups != wanted:
            raise PatchError(
                f"groups {', '.join(_active.applied.groups)} are enabled: disable() them first"
            )
        return _active.applied
    registry = registry or default_registry()
    lock = lock or Lock.read(lock_file())
    allowed = {*allow_drift, *os.environ.get(ALLOW_DRIFT_VARIABLE, "").split(",")} - {""}
    tree = SourceTree()
    findings = verify(registry, lock, tree, wanted)
    drifted = _refuse_drift(registry, findings, allowed)
    patches = registry.in_order(wanted)
    changes = Changes(roots=tuple(registry.upstreams.values()))
    try:
        for patch in patches:
            if patch.id not in allowed:
                changes.refuse_other_code(patch, tree.definition(Target.parse(patch.target)))
            changes.apply(patch, registry.aliases(patch.target))
        changes.rebind(_late_aliases)
        changes.refuse_undeclared_aliases(registry.alias_roots)
    except BaseException:
        _late_aliases.extend(changes.revert())
        raise
    ids = tuple(patch.id for patch in patches)
    applied = AppliedSet(wanted, ids, _digest(findings), drifted)
    _active = _Active(applied, changes)
    return applied


def disable() -> None:
    """Takes all patches back: every upstream attribute holds the object that it held before.

    What other modules imported from upstream in the meantime stays patched.
    """
    global _active
    if _active is not None:
        active, _active = _active, None
        _late_aliases.extend(active.changes.revert())


@contextmanager
def patched(groups: Iterable[str], **options: Any) -> Iterator[AppliedSet]:
    """Enables `groups` for a block, with the options of `enable`.

    What was enabled before the block stays enabled after it.
    """
    outer = _active is not None
    applied = enable(groups, **options)
    try:
        yield applied
    finally:
        if not outer:
            disable()


def enabled_groups() -> tuple[str, ...]:
    """Returns the groups that are enabled, in their order; none before `enable`."""
    return _active.applied.groups if _active is not None else ()


def applied_digest() -> str:
    """Returns a hash over the applied patches and the upstream code that they were applied to.

    Two ranks with the same digest run the same patched code. With nothing enabled it is the hash
    of nothing.
    """
    return _active.applied.digest if _active is not None else _digest(())


def check_same_digest(digests: Sequence[str]) -> None:
    """Checks that all ranks applied the same patches to the same upstream code.

    Args:
        digests: `applied_digest()` of every rank, by rank.

    Raises:
        PatchError: they differ; it names the ranks that differ from most.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    if len(ranks) > 1:
        most, *others = sorted(ranks, key=lambda digest: (-len(ranks[digest]), ranks[digest]))
        named = "; ".join(
            f"ranks {', '.join(map(str, ranks[digest]))}: {digest[:12]}" for digest in others
        )
        raise PatchError(
            f"ranks run different patches or different upstream code ({named}; the other "
            f"{len(ranks[most])}: {most[:12]}): install the same versions on every node and "
            "enable the same groups"
        )


def default_registry() -> Registry:
    """Returns the registry of this package's patches."""
    registry: Registry = import_module(PATCHES_PACKAGE).REGISTRY
    return registry


def lock_file() -> Path:
    """Returns the path of this package's patches.lock."""
    return Path(str(import_module(PATCHES_PACKAGE).__file__)).with_name("patches.lock")


def _refuse_drift(
    registry: Registry, findings: Sequence[Finding], allowed: Collection[str]
) -> tuple[str, ...]:
    known = {*registry.by_id, *(reliance.target for reliance in registry.reliances)}
    if unknown := set(allowed) - known:
        raise PatchError(f"allowed drift names {min(unknown)}, which is no patch and no reliance")
    bad = [finding for finding in findings if finding.state != "ok"]
    absent = [finding for finding in bad if finding.version is None]
    if absent:
        raise PatchError(summary(absent[0]) + ": install it, or do not enable its patches")
    refused = [finding for finding in bad if finding.name not in allowed]
    if refused:
        raise PatchDriftError(drift_message(refused))
    for finding in bad:
        _logger.warning("drift allowed: %s", summary(finding))
    return tuple(finding.name for finding in bad)


def _digest(findings: Iterable[Finding]) -> str:
    lines = (
        f"{finding.name} {finding.subject.target} "
        + (finding.fingerprint.tokens if finding.fingerprint else f"builtin {finding.version}")
        for finding in findings
    )
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
