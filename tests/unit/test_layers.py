"""The layers: import-linter's contracts, and what it cannot see of `megatron_resilient.patches`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.py"))
MODULES = sorted((ROOT / "megatron_resilient").rglob("*.py"))
INSTALLED_PATCHES = "megatron_resilient.patches"

# `enable` and `patches` find the patches by name: the registry loads them, nobody imports them.
PURE = (
    "algorithms",
    "simulation",
    "patching",
    "corpus",
    "telemetry",
    "report",
    "config",
    "errors",
    "patches",
)


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names; none for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` outside the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_at_import(child)


def test_the_contracts_of_import_linter_are_kept():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.name)
def test_patches_import_upstream_inside_functions_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [name for node in run_at_import(tree) for name in imported(node)]
    assert not [name for name in names if name.split(".")[0] in ("torch", "megatron")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_the_patches(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [name for node in ast.walk(tree) for name in imported(node)]
    assert not [name for name in names if f"{name}.".startswith(f"{INSTALLED_PATCHES}.")]


def test_the_package_and_its_pure_parts_import_without_torch():
    names = ["megatron_resilient", *(f"megatron_resilient.{name}" for name in PURE)]
    code = (
        "import importlib, sys\n"
        "from pkgutil import walk_packages\n"
        f"for name in {names}:\n"
        "    module = importlib.import_module(name)\n"
        "    for found in walk_packages(getattr(module, '__path__', []), name + '.'):\n"
        f"        if name != 'megatron_resilient':\n"
        "            importlib.import_module(found.name)\n"
        "print(sorted({'torch', 'megatron'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
