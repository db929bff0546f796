"""Sets patched attributes one patch at a time, remembering how to restore each of them."""

import os
import sys
from collections.abc import Collection, Iterable
from types import FunctionType
from typing import Any

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.registry import Patch
from megatron_resilient.patching.sites import MISSING, Site, sites_holding
from megatron_resilient.patching.source import Definition
from megatron_resilient.patching.target import Target

# Equal values of these types can be one object, so holding it does not mean being an alias.
_SHARED = (type(None), int, float, complex, str, bytes, tuple, frozenset)
_SHOWN = 5  # of many undeclared aliases: they have one cause


class Changes:
    """What was done to upstream.

    Args:
        roots: the top-level packages of upstream, where aliases are restored.
    """

    def __init__(self, roots: Collection[str]) -> None:
        self._roots = roots
        self._undo: list[tuple[Site, Any]] = []
        # By id, because objects need not be hashable; all are kept alive, so that no id is used
        # again. Of a static or class method both it and its function are noted.
        self._replaced: dict[int, tuple[str, Any, Any]] = {}  # id(original): (patch id, it, new)
        self._original_of: dict[int, Any] = {}  # id(new): original
        self._kept: list[Any] = []

    def apply(self, patch: Patch, aliases: Iterable[str]) -> None:
        """Replaces the target of `patch`, and those of its aliases that are loaded.

        An alias in a module that is not loaded needs nothing: it will import the new object.

        Raises:
            PatchError: the target or an alias is not there, an alias is another object, or `make`
                fails or returns what cannot be told apart later.
        """
        site = Site.of(Target.parse(patch.target))
        raw = site.value()
        if raw is MISSING:
            raise PatchError(f"patch {patch.id}: {patch.target} does not exist")
        method = type(raw) if isinstance(raw, staticmethod | classmethod) else None
        original = raw.__func__ if method else raw
        new = self._make(patch, original)
        new_raw = method(new) if method and not isinstance(new, staticmethod | classmethod) else new
        self._set(site, new_raw)
        swaps = [(raw, new_raw)] if new is new_raw else [(raw, new_raw), (original, new)]
        for alias in aliases:
            self._apply_alias(patch, Target.parse(alias), swaps)
        for before, after in swaps:
            if not isinstance(before, _SHARED):
                self._replaced[id(before)] = (patch.id, before, after)
            if not isinstance(after, _SHARED):
                self._original_of[id(after)] = before
                self._kept.append(after)

    def refuse_other_code(self, patch: Patch, definition: Definition | None) -> None:
        """Checks that the target in memory is the verified source, not someone else's patch.

        Raises:
            PatchError: it comes from another file.
        """
        found = Site.of(Target.parse(patch.target)).value()
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if id(found) in self._original_of:  # an earlier patch of ours, itself checked
            return
        code = found.__code__.co_filename if isinstance(found, FunctionType) else None
        if definition is None:
            verified, used = "a builtin", code
        else:
            verified = str(definition.module.file)
            used = getattr(sys.modules.get(definition.module.name), "__file__", None) or "no file"
            if definition.plain_function and os.path.realpath(used) == os.path.realpath(verified):
                used = code or repr(found)
        if used is not None and os.path.realpath(used) != os.path.realpath(verified):
            raise PatchError(
                f"patch {patch.id}: {patch.target} was verified as {verified}, but in memory it is "
                f"{used}: enable() must come before whatever replaces it"
            )

    def refuse_undeclared_aliases(self, roots: Collection[str]) -> None:
        """Checks that no loaded module below `roots`, nor the script, holds an original.

        Raises:
            PatchError: one does; it names the patch and the attribute.
        """
        found = [
            f"patch {self._replaced[id(value)][0]}: {site} still holds the original"
            for site, value in sites_holding(self._replaced.keys(), {*roots, "__main__"})
        ]
        if found:
            more = f"\n... and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise PatchError(
                "\n".join(found[:_SHOWN])
                + more
                + "\nCall enable() before these are imported; if it was, add them to bound_in"
            )

    def revert(self) -> list[Site]:
        """Restores every attribute, and the aliases that upstream modules have bound since.

        Returns:
            Those aliases, for `rebind` to patch again.
        """
        for site, before in reversed(self._undo):
            site.set(before)
        late = list(sites_holding(self._original_of.keys(), self._roots))
        for site, value in late:
            while id(value) in self._original_of:
                value = self._original_of[id(value)]
            site.set(value)
        return [site for site, _ in late]

    def rebind(self, sites: Iterable[Site]) -> None:
        """Patches aliases again that an earlier `revert` restored."""
        for site in sites:
            value = site.own()
            while id(value) in self._replaced:
                value = self._replaced[id(value)][2]
            if value is not site.own():
                self._set(site, value)

    def _make(self, patch: Patch, original: Any) -> Any:
        try:
            new = patch.make(original)
        except Exception as error:
            raise PatchError(f"patch {patch.id}: make() failed: {error!r}") from error
        if new is None or new is original:
            raise PatchError(f"patch {patch.id}: make() returned {new!r}, which replaces nothing")
        if not isinstance(new, _SHARED) and (
            id(new) in self._original_of or self._is_upstream(new)
        ):
            raise PatchError(
                f"patch {patch.id}: make() returned {new!r}, which stands elsewhere too; return "
                "an object of its own, or revert could not tell the two apart"
            )
        return new

    def _is_upstream(self, new: Any) -> bool:
        module = sys.modules.get(str(getattr(new, "__module__", None)))
        if module is None or module.__name__.partition(".")[0] not in self._roots:
            return False
        found: Any = module
        for part in str(getattr(new, "__qualname__", "")).split("."):
            found = getattr(found, part, None)
        return found is new

    def _apply_alias(self, patch: Patch, alias: Target, swaps: list[tuple[Any, Any]]) -> None:
        if alias.module not in sys.modules:
            return
        site = Site.of(alias)
        value = site.own()
        for before, after in swaps:
            if value is after:
                return
            if value is before:
                self._set(site, after)
                return
        raise PatchError(
            f"patch {patch.id}: bound_in names {alias}, which "
            + ("does not exist" if value is MISSING else f"is another object, {value!r}")
        )

    def _set(self, site: Site, raw: Any) -> None:
        before = site.own()
        try:
            site.set(raw)
        except (TypeError, AttributeError) as error:
            raise PatchError(f"{site} cannot be set: {error}") from error
        self._undo.append((site, before))
