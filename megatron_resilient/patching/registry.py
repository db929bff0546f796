"""What a patch is: the declarations of which the registry consists. Standard library only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


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
