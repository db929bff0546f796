"""Each rule of `doctor` on facts that are given, and the probes on this machine."""

import argparse
import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from megatron_resilient import machine as machine_module
from megatron_resilient.commands import doctor as command
from megatron_resilient.doctor import OPTIONAL, can_train, examine, state
from megatron_resilient.machine import Gpu, Machine, Torch, driver_version, probe_torch

HOPPER = Gpu("H200", (9, 0), 140 << 30)
BLACKWELL = Gpu("B200", (10, 0), 180 << 30)
FOR_BOTH = ("sm_80", "sm_90", "sm_100")

GOOD = Machine(
    python=(3, 12, 4),
    versions={"torch": "2.11.0", "megatron-core": "0.19.2"},
    requirements=(
        "megatron-core<0.20,>=0.19",
        "torch>=2.10",
        'transformer-engine[pytorch]>=2.9; extra == "gpu"',
        'nvidia-resiliency-ext>=0.6; extra == "nvrx"',
    ),
    locked={"megatron-core": "0.19.2", "torch": "2.11.0"},
    torch=Torch(cuda="13.0"),
    shared_memory_bytes=16 << 30,
)


def installed(**versions: str) -> Machine:
    """GOOD with other packages; a name's underscores stand for hyphens."""
    changes = {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(GOOD, versions={**GOOD.versions, **changes})


def with_gpus(*gpus: Gpu, **environment: str) -> Machine:
    torch = Torch(cuda="13.0", architectures=FOR_BOTH, gpus=gpus)
    return replace(GOOD, torch=torch, driver="580.65.06", environment=environment)


def test_nothing_is_wrong_with_a_good_machine():
    assert examine(GOOD) == ()
    assert examine(with_gpus(BLACKWELL)) == ()
    assert can_train(())


@pytest.mark.parametrize(
    ("machine", "severity", "says"),
    [
        (replace(GOOD, python=(3, 11, 9)), "bad", "Python 3.11.9"),
        (installed(megatron_core="0.20.0"), "bad", "megatron-core 0.20.0 is outside"),
        (installed(megatron_core="0.18.1"), "bad", "megatron-core 0.18.1 is outside"),
        (installed(torch="2.9.1"), "bad", "torch 2.9.1 is outside"),
        (
            installed(megatron_core="0.19.1"),
            "note",
            "megatron-core is 0.19.1, the patches were locked against 0.19.2",
        ),
        (
            replace(GOOD, versions={"torch": "2.11.0"}),
            "bad",
            "megatron-core<0.20,>=0.19 is not installed",
        ),
        (replace(GOOD, requirements=None), "bad", "source tree that is not installed"),
        (installed(nvidia_resiliency_ext="0.4.1"), "bad", "breaks the import"),
        (installed(nvidia_resiliency_ext="0.6.0.dev3"), "bad", "breaks the import"),
        (installed(transformer_engine="2.1.0"), "note", "transformer-engine 2.1.0 is outside"),
        (installed(apex="0.9.10.dev0"), "note", "web toolkit"),
        (
            replace(GOOD, torch=Torch(error="libcudart.so.13: cannot open")),
            "bad",
            "libcudart.so.13",
        ),
        (replace(GOOD, driver="470.1"), "note", "sees no device"),
        (
            replace(GOOD, driver="470.1", torch=Torch(cuda="13.0", complaint="driver too old")),
            "note",
            "driver too old",
        ),
        (replace(GOOD, driver="580.1", torch=Torch()), "note", "built without CUDA"),
        (with_gpus(Gpu("V100", (7, 0), 16 << 30)), "bad", "no kernels for V100"),
        (with_gpus(BLACKWELL, HOPPER), "note", "CUDA_DEVICE_MAX_CONNECTIONS"),
        (
            with_gpus(HOPPER, CUDA_DEVICE_MAX_CONNECTIONS="8"),
            "note",
            "CUDA_DEVICE_MAX_CONNECTIONS",
        ),
        (replace(GOOD, shared_memory_bytes=64 << 20), "note", "only 64 MiB"),
    ],
)
def test_a_rule_speaks(machine, severity, says):
    told = [finding for finding in examine(machine) if says in finding.what]
    assert [finding.severity for finding in told] == [severity]
    assert told[0].fix
    assert can_train(examine(machine)) == (severity == "note")


@pytest.mark.parametrize(
    "machine",
    [
        installed(nvidia_resiliency_ext="0.6.0"),
        replace(installed(torch="2.12.0a0+5c3f1b7.nv26.06"), locked={}),  # NVIDIA's containers
        installed(torch="2.11.0+cpu"),  # the same release, built otherwise
        installed(apex="0.1"),
        installed(transformer_engine="2.9.0"),
        with_gpus(HOPPER, CUDA_DEVICE_MAX_CONNECTIONS="1"),
        with_gpus(Gpu("A10", (8, 6), 24 << 30), CUDA_DEVICE_MAX_CONNECTIONS="1"),  # runs sm_80
        replace(GOOD, shared_memory_bytes=None),
    ],
)
def test_a_rule_is_silent(machine):
    assert examine(machine) == ()


def test_intermediate_code_runs_on_later_devices_and_only_there():
    later = with_gpus(Gpu("R100", (11, 0), 1 << 30))
    ptx = replace(later, torch=replace(later.torch, architectures=("sm_90a", "compute_90")))
    assert not can_train(examine(later))
    assert can_train(examine(ptx))
    older = replace(ptx, torch=replace(ptx.torch, gpus=(Gpu("A100", (8, 0), 1 << 30),)))
    assert not can_train(examine(older))


def test_bad_findings_come_first():
    machine = replace(GOOD, python=(3, 11, 0), shared_memory_bytes=1 << 20)
    assert [finding.severity for finding in examine(machine)] == ["bad", "note"]


def test_an_optional_package_is_missing_idle_or_used():
    fused = next(optional for optional in OPTIONAL if optional.needs_gpu)
    anywhere = next(optional for optional in OPTIONAL if not optional.needs_gpu)
    both = {fused.name: "1.0", anywhere.name: "1.0"}
    cpu, gpu = replace(GOOD, versions=both), replace(with_gpus(HOPPER), versions=both)
    assert [state(fused, m) for m in (GOOD, cpu, gpu)] == ["missing", "idle", "used"]
    assert [state(anywhere, m) for m in (GOOD, cpu, gpu)] == ["missing", "used", "used"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("echo 'Traceback' >&2; echo 'ImportError: libfoo.so' >&2; exit 1", "ImportError: libfoo"),
        ("kill -SEGV $$", "exit status -11"),
        ("exec sleep 60", "no answer within 0.2 s"),
    ],
)
def test_a_torch_that_breaks_is_reported(tmp_path, body, error):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    assert error in probe_torch(str(python), timeout_seconds=0.2 if "sleep" in body else 30).error


def test_what_torch_says_is_taken_over(tmp_path):
    python = tmp_path / "python"
    said = {
        "cuda": "13.0",
        "architectures": ["sm_90"],
        "gpus": [{"name": "H200", "capability": [9, 0], "memory_bytes": 140 << 30}],
        "complaint": None,
    }
    python.write_text(f"#!/bin/sh\necho a greeting of some plugin\necho '{json.dumps(said)}'\n")
    python.chmod(0o755)
    assert probe_torch(str(python)) == Torch(cuda="13.0", architectures=("sm_90",), gpus=(HOPPER,))


@pytest.mark.parametrize(
    ("report", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May 2", "470.256.02"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release", "580.65"),
        ("GCC version: gcc 12", None),
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path, report, version):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(report + "\nGCC version:  gcc version 12.3.0\n")
    assert driver_version(file) == version


def test_this_machine_is_seen_as_it_is():
    seen = machine_module.inspect_machine()
    assert seen.python == sys.version_info[:3]
    assert seen.versions["megatron-core"] == metadata.version("megatron-core")
    assert seen.torch.error is None
    assert any(text.startswith("megatron-core") for text in seen.requirements)
    assert set(seen.locked) == {"megatron-core", "torch"}
    assert can_train(examine(seen))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command on given facts; returns its exit status and what it printed."""

    def run(machine: Machine, *, as_json: bool):
        monkeypatch.setattr(machine_module, "inspect_machine", lambda: machine)
        status = command.run(argparse.Namespace(json=as_json))
        return status, capsys.readouterr().out

    return run


def test_json_is_one_document_and_the_exit_status_is_the_answer(run):
    status, printed = run(with_gpus(HOPPER), as_json=True)
    report = json.loads(printed)
    assert (status, report["can_train"]) == (0, True)
    assert report["device"]["gpus"] == [
        {"name": "H200", "capability": "9.0", "memory_bytes": 140 << 30}
    ]
    assert {package["name"] for package in report["optional"]} == {o.name for o in OPTIONAL}

    status, printed = run(installed(nvidia_resiliency_ext="0.4.1"), as_json=True)
    report = json.loads(printed)
    assert (status, report["can_train"]) == (1, False)
    assert report["findings"][0]["severity"] == "bad"


def test_people_read_what_is_wrong_and_what_to_do(run):
    status, printed = run(installed(nvidia_resiliency_ext="0.4.1"), as_json=False)
    assert status == 1
    assert "breaks the import" in printed
    assert "pip uninstall nvidia-resiliency-ext" in printed
    status, printed = run(with_gpus(HOPPER), as_json=False)
    assert status == 0
    assert "H200, capability 9.0, 140 GiB" in " ".join(printed.split())


def test_missing_packages_do_not_stop_the_doctor(run):
    bare = Machine(python=(3, 12, 0), versions={}, requirements=GOOD.requirements)
    status, printed = run(bare, as_json=False)
    assert status == 1
    assert "torch>=2.10 is not installed" in printed


def test_facts_are_read_from_the_kernel_of_this_machine():
    reports = Path("/proc/driver/nvidia/version")
    assert (driver_version(reports) is not None) == reports.is_file()
