"""Names are found in files, through re-imports, without importing anything."""

import subprocess
import sys

import pytest

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.target import Target


@pytest.fixture
def tree(tmp_path):
    files = {
        "pkg/__init__.py": "raise RuntimeError('imported')\n",
        "pkg/a.py": """\
from typing import overload
from .sub.b import plain as renamed, missing
from .sub import b
from . import sub
from pkg.sub import *
import os

@overload
def twice(x: int): ...
def twice(x): ...

if os.name == "never":
    def either(): return 1
else:
    def either(): return 2

try:
    from nowhere import optional
except ImportError:
    optional = None

first, (second, third) = 1, (2, 3)
annotated: int = 4
renamed.attribute = 5

class Outer:
    field: int = 1
    class Inner:
        def method(self): ...
    @property
    def both(self): ...
    @both.setter
    def both(self, value): ...
    inherited = None

class Derived(Outer): ...

from .loop import circle
""",
        "pkg/loop.py": "from .a import circle\n",
        "pkg/sub/__init__.py": "from .b import starred, _hidden\n",
        "pkg/sub/b.py": "def plain(): ...\ndef starred(): ...\ndef _hidden(): ...\n",
        "pkg/namespace/deep/c.py": "from ... import a\nfrom ...sub.b import plain\n",
        "pkg/broken.py": "def f(:\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return SourceTree([str(tmp_path)])


@pytest.mark.parametrize(
    ("target", "home", "statements"),
    [
        ("pkg.sub.b:plain", "pkg.sub.b:plain", 1),
        ("pkg.a:renamed", "pkg.sub.b:plain", 1),
        ("pkg.a:starred", "pkg.sub.b:starred", 1),
        ("pkg.namespace.deep.c:plain", "pkg.sub.b:plain", 1),
        ("pkg.a:twice", "pkg.a:twice", 2),
        ("pkg.a:either", "pkg.a:either", 2),
        ("pkg.a:optional", "pkg.a:optional", 2),
        ("pkg.a:third", "pkg.a:third", 1),
        ("pkg.a:annotated", "pkg.a:annotated", 1),
        ("pkg.a:Outer", "pkg.a:Outer", 1),
        ("pkg.a:Outer.field", "pkg.a:Outer.field", 1),
        ("pkg.a:Outer.both", "pkg.a:Outer.both", 2),
        ("pkg.a:Outer.Inner.method", "pkg.a:Outer.Inner.method", 1),
    ],
)
def test_found(tree, target, home, statements):
    definition = tree.definition(Target.parse(target))
    assert str(definition.target) == home
    assert len(definition.statements) == statements


@pytest.mark.parametrize(
    "target",
    [
        "pkg.a:nothing",
        "pkg.a:missing",
        "pkg.a:_hidden",  # a star import does not bring it
        "pkg.a:os",
        "pkg.a:sub",
        "pkg.a:b",
        "pkg.a:circle",
        "pkg.a:Derived.field",
        "pkg.a:twice.inner",
        "pkg.nothing:x",
        "pkg.namespace:x",
        "nothing.at.all:x",
    ],
)
def test_not_found(tree, target):
    assert tree.definition(Target.parse(target)) is None


def test_what_is_not_python_is_named(tree):
    with pytest.raises(PatchError, match=r"broken\.py line 1"):
        tree.definition(Target.parse("pkg.broken:f"))


def test_places(tree):
    definition = tree.definition(Target.parse("pkg.a:renamed"))
    assert definition.module.relative_file == "pkg/sub/b.py"
    assert tree.module("pkg.sub").relative_file == "pkg/sub/__init__.py"
    assert definition.first_line == 1
    assert [name for name, _ in tree.files("pkg")] == [
        "pkg",
        "pkg.a",
        "pkg.broken",
        "pkg.loop",
        "pkg.namespace.deep.c",
        "pkg.sub",
        "pkg.sub.b",
    ]


def test_decorators_belong_to_a_function(tree):
    assert tree.definition(Target.parse("pkg.a:twice")).first_line == 8
    assert not tree.definition(Target.parse("pkg.a:Outer.both")).plain_function
    assert tree.definition(Target.parse("pkg.a:twice")).plain_function


def test_builtins_have_no_source():
    tree = SourceTree()
    assert tree.definition(Target.parse("math:sin")) is None
    assert tree.definition(Target.parse("sys:exit")) is None


def test_torch_and_megatron_are_found_without_being_imported():
    program = """
import sys
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.target import Target
tree = SourceTree()
for name in ("torch.cuda:current_device", "torch.distributed:all_reduce", "torch:compile",
             "torch.cuda:Stream", "megatron.core:DistributedDataParallel",
             "megatron.training:pretrain"):
    print(tree.definition(Target.parse(name)).target)
assert tree.definition(Target.parse("torch:empty")) is None
assert tree.definition(Target.parse("torch:Tensor.to")) is None
assert not {"torch", "megatron"} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "torch.cuda:current_device",
        "torch.distributed.distributed_c10d:all_reduce",
        "torch:compile",
        "torch.cuda.streams:Stream",
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "megatron.training.training:pretrain",
    ]
