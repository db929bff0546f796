"""What a patch is, and the registry of all of them. Imports no upstream."""

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from types import ModuleType
from typing import Any, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.target import Target

# In the order in which they are applied: the CPU backend must stand before Megatron is imported.
GROUPS = ("cpu", "fixes", "core")
# Distribution -> its top-level package; who is built on another stands after it.
UPSTREAMS = {"torch": "torch", "megatron-core": "megatron"}


@dataclass(frozen=True)
class Patch:
    """One upstream name that we wrap or replace.

    Attributes:
        id: unique, `group.what`, kebab-case (`cpu.new-group`).
        group: `core` (the plugin itself), `fixes` (upstream defects) or `cpu` (the CPU backend).
        target: `package.module:name` or `package.module:Class.name`.
        kind: `wrap` calls the original, `replace` does not.
        make: takes the original object, returns the new one. Called once at apply time; torch and
            Megatron are imported inside it, never at the top of a patch module.
        reason: what goes wrong, or is missing, without the patch.
        no_seam: why no argument, hook or subclass serves.
        upstream: the distribution that owns the target (`megatron-core` or `torch`).
        versions: PEP 440 specifier of the upstream versions for which it was written.
        bound_in: other names under which modules hold the same object because they imported it
            with `from ... import`; each is patched and reverted with the target.
        removable_when: what has to happen upstream for this patch to go.
        after: ids of patches on the same target that are applied first (only when there are two).
    """

    id: str
    group: str
    target: str
    kind: Literal["wrap", "replace"]
    make: Callable[[Any], Any]
    reason: str
    no_seam: str
    upstream: str
    versions: str
    removable_when: str
    bound_in: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reliance:
    """An upstream name that we override in a subclass, or whose inner workings we count on.

    It is locked like a patch's target: when it changes, `patches check` says so.

    Attributes:
        target: `package.module:name` or `package.module:Class.name`.
        why: which of our code relies on what in it.
        upstream: the distribution that owns it.
    """

    target: str
    why: str
    upstream: str = "megatron-core"


@dataclass(frozen=True)
class Registry:
    """All patches and reliances, checked against each other when it is made.

    Attributes:
        patches: in order of declaration.
        reliances: in order of declaration.
        upstreams: distribution name -> top-level package, in the order in which they are patched.
        alias_roots: packages in which every binding of a patched object must be declared.

    Raises:
        PatchError: a malformed or contradictory declaration, named.
    """

    patches: tuple[Patch, ...]
    reliances: tuple[Reliance, ...] = ()
    upstreams: Mapping[str, str] = field(default_factory=lambda: UPSTREAMS)
    alias_roots: tuple[str, ...] = ("megatron",)

    def __post_init__(self) -> None:
        for patch in self.patches:
            self._check_declaration(patch)
        for reliance in self.reliances:
            self._check_upstream(f"reliance on {reliance.target}", reliance)
        for patch_id, count in Counter(patch.id for patch in self.patches).items():
            if count > 1:
                raise PatchError(f"patch id {patch_id} is declared {count} times")
        for patch in self.patches:
            self._check_after(patch)
        self._check_names()

    @classmethod
    def from_modules(cls, modules: Iterable[ModuleType]) -> Self:
        """Collects `PATCHES` and, where there is one, `RELIES_ON` of patch modules.

        Raises:
            PatchError: a module declares no `PATCHES`, or see the class.
        """
        patches: list[Patch] = []
        reliances: list[Reliance] = []
        for module in modules:
            if not hasattr(module, "PATCHES"):
                raise PatchError(
                    f"{module.__name__} declares no PATCHES; the name of a helper module starts "
                    "with an underscore"
                )
            patches += module.PATCHES
            reliances += getattr(module, "RELIES_ON", ())
        return cls(tuple(patches), tuple(reliances))

    @cached_property
    def by_id(self) -> dict[str, Patch]:
        """The patches by their ids."""
        return {patch.id: patch for patch in self.patches}

    @property
    def targets(self) -> dict[str, str]:
        """Every locked target -> the distribution that owns it, sorted by target."""
        declared: tuple[Patch | Reliance, ...] = (*self.patches, *self.reliances)
        return dict(sorted((each.target, each.upstream) for each in declared))

    def aliases(self, target: str) -> tuple[str, ...]:
        """Returns the aliases that the patches on `target` declare, sorted."""
        return tuple(
            sorted({name for p in self.patches if p.target == target for name in p.bound_in})
        )

    def in_order(self, groups: Collection[str]) -> tuple[Patch, ...]:
        """Returns the patches of `groups` in the order in which they are applied.

        Groups stand in the order of `GROUPS`. Inside one, the upstream on which the others are
        built comes first, because importing the others binds its names.
        """
        upstreams = list(self.upstreams)
        chosen = {
            patch.id: patch
            for patch in sorted(
                (patch for patch in self.patches if patch.group in groups),
                key=lambda patch: (GROUPS.index(patch.group), upstreams.index(patch.upstream)),
            )
        }
        ordered: dict[str, Patch] = {}

        def add(patch: Patch) -> None:
            for earlier in patch.after:
                if earlier in chosen:
                    add(chosen[earlier])
            ordered.setdefault(patch.id, patch)

        for patch in chosen.values():
            add(patch)
        return tuple(ordered.values())

    def _check_declaration(self, patch: Patch) -> None:
        where = f"patch {patch.id}"
        if patch.group not in GROUPS:
            raise PatchError(f"{where}: unknown group {patch.group!r}, not in {', '.join(GROUPS)}")
        if not re.fullmatch(rf"{patch.group}\.[a-z0-9]+(-[a-z0-9]+)*", patch.id):
            raise PatchError(f"{where}: the id must read {patch.group}.what-it-does, kebab-case")
        if patch.kind not in ("wrap", "replace"):
            raise PatchError(f"{where}: kind is wrap or replace, not {patch.kind!r}")
        for name in ("reason", "no_seam", "removable_when"):
            if not getattr(patch, name).strip():
                raise PatchError(f"{where}: `{name}` is empty")
        try:
            SpecifierSet(patch.versions)
        except InvalidSpecifier as error:
            raise PatchError(f"{where}: versions {patch.versions!r} is no specifier") from error
        if not patch.versions.strip():
            raise PatchError(f"{where}: `versions` is empty")
        self._check_upstream(where, patch)
        for alias in patch.bound_in:
            Target.parse(alias)

    def _check_upstream(self, where: str, declared: Patch | Reliance) -> None:
        if declared.upstream not in self.upstreams:
            raise PatchError(
                f"{where}: unknown upstream {declared.upstream!r}, not in "
                f"{', '.join(self.upstreams)}"
            )
        if Target.parse(declared.target).root != self.upstreams[declared.upstream]:
            raise PatchError(f"{where}: {declared.target} is not part of {declared.upstream}")

    def _check_after(self, patch: Patch) -> None:
        for earlier_id in patch.after:
            earlier = self.by_id.get(earlier_id)
            if earlier is None:
                raise PatchError(f"patch {patch.id}: `after` names the unknown patch {earlier_id}")
            if earlier.target != patch.target:
                raise PatchError(
                    f"patch {patch.id}: `after` names {earlier_id}, which has another target "
                    f"({earlier.target}); only patches on one target have an order"
                )
            if GROUPS.index(earlier.group) > GROUPS.index(patch.group):
                raise PatchError(
                    f"patch {patch.id}: `after` names {earlier_id}, but group {earlier.group} "
                    f"is applied after group {patch.group}"
                )
        if patch.id in self._predecessors(patch):
            raise PatchError(f"patch {patch.id}: `after` leads in a circle")

    def _predecessors(self, patch: Patch) -> set[str]:
        seen: set[str] = set()
        waiting = list(patch.after)
        while waiting:
            patch_id = waiting.pop()
            if patch_id in self.by_id and patch_id not in seen:
                seen.add(patch_id)
                waiting += self.by_id[patch_id].after
        return seen

    def _check_names(self) -> None:
        for first, second in combinations(self.patches, 2):
            if first.target == second.target:
                if first.id not in self._predecessors(
                    second
                ) and second.id not in self._predecessors(first):
                    raise PatchError(
                        f"patches {first.id} and {second.id} both target {first.target}: "
                        "say in `after` which comes first"
                    )
            elif shared := {first.target, *first.bound_in} & {second.target, *second.bound_in}:
                raise PatchError(
                    f"patches {first.id} and {second.id} have different targets, but both bind "
                    f"{min(shared)}: give them the same target and an order"
                )


def collect(package: str) -> Registry:
    """Builds the registry of all patch modules in `package`, without importing any upstream.

    Args:
        package: dotted name; modules whose names start with an underscore are helpers.

    Raises:
        PatchError: see `Registry`.
    """
    path = importlib.import_module(package).__path__
    return Registry.from_modules(
        importlib.import_module(f"{package}.{module.name}")
        for module in sorted(pkgutil.iter_modules(path), key=lambda module: module.name)
        if not module.name.startswith("_")
    )
