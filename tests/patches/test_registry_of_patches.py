"""What holds for every patch of this package, against the installed torch and Megatron."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_resilient.patches import REGISTRY

from megatron_resilient.patching.page import patches_page

ROOT = Path(__file__).resolve().parents[2]


def python(program: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, check=False
    )


def test_there_are_patches_of_every_group():
    assert {patch.group for patch in REGISTRY.patches} == {"cpu", "fixes", "core"}


def test_check_passes_and_imports_neither_torch_nor_megatron():
    done = python(
        """
import argparse, sys
from megatron_resilient.commands import patches
parser = argparse.ArgumentParser()
patches.configure(parser)
code = patches.run(parser.parse_args(["check", "--json"]))
heavy = {"torch", "megatron", "numpy", "rich"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(code)
"""
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert len(document["findings"]) == len(REGISTRY.patches) + len(REGISTRY.reliances)


def test_page_is_up_to_date():
    page = ROOT / "docs" / "patches.md"
    assert page.read_text(encoding="utf-8") == patches_page(REGISTRY), (
        "run `megatron-resilient patches docs`"
    )


@pytest.mark.slow
def test_all_apply_and_leave_no_trace():
    """Twice: before Megatron is imported, as training does it, and again with it loaded."""
    done = python(
        """
import sys, types, warnings

def main():
    import torch
    from megatron_resilient.patching import apply
    from megatron_resilient.patching.registry import GROUPS

    def snapshot():
        found = {}
        for name, module in list(sys.modules.items()):
            root = name.partition(".")[0]
            if root in ("torch", "megatron") and isinstance(module, types.ModuleType):
                for attribute, value in list(vars(module).items()):
                    found[name, attribute] = value
                    if issubclass(type(value), type) and value.__module__ == name:
                        for inner, held in list(vars(value).items()):
                            found[name, attribute, inner] = held
        return found

    def changed(before, after):
        return [key for key in before if key in after and after[key] is not before[key]]

    stock = snapshot()
    first = apply.enable(GROUPS)
    import megatron.training
    assert set(first.ids) == {patch.id for patch in apply.default_registry().patches}
    apply.disable()
    patched = {patch.target.replace(":", ".") for patch in apply.default_registry().patches}
    traces = [key for key in changed(stock, snapshot()) if ".".join(key) in patched]
    assert not traces, traces
    stock = snapshot()
    second = apply.enable(GROUPS)
    assert second == first
    during = changed(stock, snapshot())
    assert len(during) >= len(first.ids), during
    apply.disable()
    traces = changed(stock, snapshot())
    assert not traces, traces

main()
""",
        "-W",
        "ignore",
    )
    assert done.returncode == 0, done.stderr
