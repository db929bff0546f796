"""A small upstream package on disk, to be patched, mutated and broken by tests."""

import importlib
import sys
from pathlib import Path
from typing import Any

from megatron_resilient.patching.lock import Lock
from megatron_resilient.patching.registry import Patch, Registry, Reliance
from megatron_resilient.patching.source import SourceTree

FILES = {
    "__init__.py": "",
    "ops.py": '''\
"""Operations."""

import functools


def scale(x, factor=2):
    """Scales."""
    # a comment
    return x * factor


@functools.cache
def cached(x):
    return x + 100


class Base:
    def inherited(self):
        return "base"


class Engine(Base):
    level = 3

    def run(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 2

    @classmethod
    def build(cls, x):
        return (cls.__name__, x)

    @property
    def size(self):
        return 7


LIMIT = 10
''',
    "user.py": "from fakeup.ops import scale\n\n\ndef use(x):\n    return scale(x)\n",
    "late.py": "from .ops import scale as rescale\n\n\ndef use(x):\n    return rescale(x)\n",
    "api.py": "from fakeup.ops import *\n",
}


class FakeUpstream:
    """The distribution `fakeup`, version 1.0, in a directory that stands on sys.path."""

    def __init__(self, site: Path, version: str = "1.0") -> None:
        self.site = site
        self.package = site / "fakeup"
        self.package.mkdir(parents=True)
        for name, text in FILES.items():
            self.package.joinpath(name).write_text(text)
        self.set_version(version)

    def set_version(self, version: str) -> None:
        info = self.site / "fakeup-0.dist-info"
        info.mkdir(exist_ok=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: fakeup\nVersion: {version}\n"
        )

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces text in one file; `old` has to be there."""
        file = self.package / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def load(self, name: str) -> Any:
        """Imports one module of the package."""
        return importlib.import_module(f"fakeup.{name}")

    def unload(self) -> None:
        """Forgets the imported modules, so that the next import reads the files again."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "fakeup"]:
            del sys.modules[name]

    def registry(self, *patches: Patch, relies: tuple[Reliance, ...] = ()) -> Registry:
        return Registry(patches, relies, upstreams={"fakeup": "fakeup"}, alias_roots=("fakeup",))

    def lock(self, registry: Registry) -> Lock:
        """Locks the registry against the files as they are now."""
        return Lock.of_installed(registry, SourceTree())


def patch(name: str, target: str, make: Any, **changes: Any) -> Patch:
    """Returns a patch of group core, unless said otherwise."""
    fields = {
        "id": f"{changes.get('group', 'core')}.{name}",
        "group": "core",
        "target": target,
        "kind": "wrap",
        "make": make,
        "reason": "A test needs it.",
        "no_seam": "There is none.",
        "upstream": "fakeup",
        "versions": ">=1,<2",
        "removable_when": "The test goes.",
    }
    return Patch(**{**fields, **changes})


def plus(amount: Any) -> Any:
    """Returns a `make` that adds `amount` to what the original returns."""

    def make(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) + amount

        return wrapper

    return make
