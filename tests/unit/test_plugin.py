"""Switching the plugin on and off, in processes of their own: what is patched stays imported."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_resilient import plugin
from megatron_resilient.errors import ConfigError
from megatron_resilient.patching import apply


def python(program: str, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


FUSIONS = "megatron.core.fusions.fused_bias_swiglu"


@pytest.fixture
def enabled(monkeypatch):
    """The groups that `enable` asks for, without applying them; Megatron is not imported."""
    asked = []
    monkeypatch.delitem(sys.modules, FUSIONS, raising=False)
    monkeypatch.setattr(apply, "enable", asked.append)
    monkeypatch.setattr(sys, "argv", ["pretrain.py"])
    return asked


def see_cuda(monkeypatch, there: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)


@pytest.mark.parametrize(
    ("argv", "device"),
    [
        ("--lr 1", "auto"),
        ("--resilient-device cpu --lr 1", "cpu"),
        ("--resilient-device=cuda", "cuda"),
        ("--resilient-device cpu --lr 1 --resilient-device=cuda", "cuda"),
        ("--resilient-device=cuda --resilient-device cpu", "cpu"),
        ("--lr 1 --resilient-device", "auto"),  # the parser will say that the value is missing
        ("--resilient-device-other cpu", "auto"),
    ],
)
def test_device_from_command_line(argv, device):
    assert plugin.device_from_command_line(argv.split()) == device


@pytest.mark.parametrize(
    ("device", "there", "groups"),
    [
        (None, True, ("fixes", "core")),
        (None, False, ("cpu", "fixes", "core")),
        ("auto", True, ("fixes", "core")),
        ("cpu", True, ("cpu", "fixes", "core")),
        ("cuda", True, ("fixes", "core")),
    ],
)
def test_groups(enabled, monkeypatch, device, there, groups):
    see_cuda(monkeypatch, there)
    plugin.enable(device)
    assert enabled == [groups]


def test_the_command_line_chooses_where_the_call_does_not(enabled, monkeypatch):
    see_cuda(monkeypatch, True)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--resilient-device", "cpu"])
    plugin.enable()
    plugin.enable("cuda")
    assert enabled == [("cpu", "fixes", "core"), ("fixes", "core")]


@pytest.mark.parametrize("device", ["gpu", "CPU", "cuda:0"])
def test_a_device_that_is_none_is_refused(enabled, device):
    with pytest.raises(ConfigError, match=f"--resilient-device {device}: must be one of auto, cpu"):
        plugin.enable(device)
    assert enabled == []


def test_cuda_is_not_taken_for_granted(enabled, monkeypatch):
    see_cuda(monkeypatch, False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        plugin.enable("cuda")
    assert enabled == []


def test_compiled_fusions_are_too_late_on_the_cpu_only(enabled, monkeypatch):
    def plain():
        pass

    see_cuda(monkeypatch, True)
    compiled = functools.wraps(plain)(lambda: plain())
    monkeypatch.setitem(sys.modules, FUSIONS, SimpleNamespace(swiglu=compiled))
    plugin.enable("cuda")
    with pytest.raises(ConfigError, match="move enable\\(\\) above the first megatron import"):
        plugin.enable("cpu")
    monkeypatch.setitem(sys.modules, FUSIONS, SimpleNamespace(swiglu=plain))
    plugin.enable("cpu")
    assert enabled == [("fixes", "core"), ("cpu", "fixes", "core")]


def test_importing_the_package_patches_nothing_and_imports_no_torch():
    done = python(
        "import sys, megatron_resilient, megatron_resilient.plugin\n"
        "from megatron_resilient.patching import apply\n"
        "print(sorted({'torch', 'megatron'} & sys.modules.keys()), apply.enabled_groups())"
    )
    assert (done.stdout, done.stderr) == ("[] ()\n", "")


@pytest.mark.slow
def test_enable_and_disable_on_a_cpu():
    """Real patches, real torch and Megatron; `disable` after a block that found it enabled."""
    done = python(
        """
import torch
import megatron_resilient
from megatron_resilient import plugin

stock = torch.cuda.current_device, torch.empty
megatron_resilient.enable()
assert plugin.on_cpu()
assert torch.cuda.current_device() == torch.device("cpu")
assert torch.empty(3, device="cuda").device.type == "cpu"
assert not torch.cuda.is_available()
with megatron_resilient.patched():
    assert plugin.on_cpu()
assert plugin.on_cpu()

from megatron.training import training
assert training.train_step.__wrapped__.__module__ == "megatron.training.training"

megatron_resilient.disable()
assert not plugin.on_cpu()
assert (torch.cuda.current_device, torch.empty) == stock
assert not hasattr(training.train_step, "__wrapped__")

with megatron_resilient.patched("cpu"):
    assert torch.cuda.current_device() == torch.device("cpu")
    assert hasattr(training.train_step, "__wrapped__")
assert (torch.cuda.current_device, torch.empty) == stock
megatron_resilient.disable()
""",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_megatron_imported_too_early():
    done = python(
        """
import torch
import megatron.core
import megatron_resilient
from megatron_resilient.patching import apply

stock = torch.cuda.current_device
try:
    megatron_resilient.enable()
except megatron_resilient.plugin.ConfigError as error:
    print(error)
assert torch.cuda.current_device is stock
assert apply.enabled_groups() == ()
"""
    )
    assert done.returncode == 0, done.stderr
    assert "move enable() above the first megatron import" in done.stdout
