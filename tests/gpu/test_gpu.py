"""What needs a CUDA device, and as much of it as can be tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = str(ROOT / "tools" / "gpu_check.py")

ENABLE = """
import torch
import megatron_resilient
from megatron_resilient import plugin
from megatron_resilient.patching import apply

stock = {name: value for name, value in [*vars(torch).items(), *vars(torch.cuda).items()]}
megatron_resilient.enable()
assert apply.enabled_groups() == ("fixes", "core"), apply.enabled_groups()
assert not plugin.on_cpu()
now = {name: value for name, value in [*vars(torch).items(), *vars(torch.cuda).items()]}
assert not [name for name in stock if now[name] is not stock[name]]

from megatron.training import training
assert hasattr(training.train_step, "__wrapped__")
"""


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def cuda():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def passed(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert [each for each in result["comparisons"] if not each["good"]] == []
    assert (done.returncode, result["ok"]) == (0, True)
    return result


@pytest.mark.gpu
def test_enable_leaves_torch_alone(cuda):
    done = python("-c", ENABLE + "assert torch.cuda.current_device() == 0\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_losses_on_the_device(cuda):
    result = passed(python(CHECK, "--json"))
    assert {run["device"] == "cpu" for run in result["runs"].values()} == {True, False}


@pytest.mark.slow
def test_enable_leaves_torch_alone_where_a_device_is_feigned():
    """Real patches, and a torch that only claims to see a device."""
    done = python("-c", "import torch\ntorch.cuda.is_available = lambda: True\n" + ENABLE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_check_itself_on_the_cpu(tmp_path):
    """Started by torchrun, whose variables the runs inside must not take for theirs."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    options = ("--device", "cpu", "--steps", "10", "--dir", str(tmp_path), "--json")
    result = passed(python(*launcher, CHECK, *options))
    assert list(result["runs"]) == [
        "cpu",
        "fp32 off",
        "fp32 on",
        "fp32 resumed",
        "slots",
        "bf16 off",
        "bf16 on",
    ]
    assert result["runs"]["fp32 off"]["patch_groups"] == ["cpu"]
    assert len(result["runs"]["fp32 resumed"]["losses"]) == 5
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == result


def test_a_run_that_fails_is_named(tmp_path):
    (tmp_path / "data" / "stdlib.bin").mkdir(parents=True)
    done = python(CHECK, "--device", "cpu", "--dir", str(tmp_path))
    assert done.returncode == 1
    log = tmp_path / "prepare-data.log"
    assert "stdlib.bin: is a folder" in done.stderr
    assert done.stderr.endswith(f"\nprepare-data ended with status 2; see {log}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "9"], "--steps 9: at least 10 are needed"),
        ([], "torch sees no CUDA device; --device cpu goes the same way"),
    ],
)
def test_wrong_usage_is_told_at_once(monkeypatch, options, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = python(CHECK, *options)
    assert done.returncode == 2
    assert message in done.stderr
