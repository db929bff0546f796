"""The places where an object is bound: attributes of modules and classes, read and set raw."""

import importlib
import inspect
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.target import Target

MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "MISSING"})()


@dataclass(frozen=True)
class Site:
    """One attribute of a module or a class."""

    owner: Any
    name: str

    @classmethod
    def of(cls, target: Target) -> "Site":
        """Imports the module of a target and finds the attribute.

        Raises:
            PatchError: the import fails, or the class is not there.
        """
        try:
            owner: Any = importlib.import_module(target.module)
            for part in target.path[:-1]:
                owner = getattr(owner, part)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{target} cannot be reached: {error}") from error
        return cls(owner, target.path[-1])

    def own(self) -> Any:
        """What the owner itself holds, a static or class method unbound; MISSING if inherited."""
        return vars(self.owner).get(self.name, MISSING)

    def value(self) -> Any:
        """What the owner holds or inherits, raw; MISSING if neither."""
        own = self.own()
        if own is not MISSING:
            return own
        if isinstance(self.owner, type):
            return inspect.getattr_static(self.owner, self.name, MISSING)
        return getattr(self.owner, self.name, MISSING)

    def set(self, raw: Any) -> None:
        """Binds `raw`; MISSING unbinds, so that the inherited attribute shows again."""
        if raw is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, raw)

    def __str__(self) -> str:
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}:{self.name}"


def sites_holding(ids: Collection[int], roots: Collection[str]) -> Iterator[tuple[Site, Any]]:
    """Yields the attributes of loaded modules and of their classes that hold certain objects.

    Args:
        ids: `id()` of each object.
        roots: top-level packages whose modules are searched.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in roots or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ids:
                yield Site(module, name), value
            # Not isinstance, which asks instances for their __class__; some warn when touched.
            if issubclass(type(value), type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    if id(inner) in ids:
                        yield Site(value, attribute), inner
