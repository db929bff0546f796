"""What a fresh clone and a fresh machine depend on: the wheel, the Makefile, its scripts."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BUILD_INPUTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
SHELL_SCRIPTS = sorted(
    [
        ROOT / ".ci/run",
        *ROOT.glob("tools/*.sh"),
        *ROOT.glob("examples/**/*.sh"),
        *ROOT.glob("examples/*/*.sbatch"),
    ]
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy: leftovers of older builds in the tree cannot get into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in ("megatron_resilient", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignore)
    for name in BUILD_INPUTS:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", target, source], check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_the_lock(wheel):
    names = set(wheel.namelist())
    for top, installed in (
        ("megatron_resilient", "megatron_resilient"),
        ("patches", "megatron_resilient/patches"),
    ):
        modules = sorted((ROOT / top).rglob("*.py"))
        assert len(modules) > 5
        for module in modules:
            assert f"{installed}/{module.relative_to(ROOT / top)}" in names
    assert "megatron_resilient/patches/patches.lock" in names
    assert not [name for name in names if name.split("/")[0] in ("tests", "tools", "patches")]


def test_the_wheel_names_its_program_its_licence_and_its_needs(wheel):
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "megatron-resilient = megatron_resilient.cli:main" in wheel.read(entry_points).decode()
    assert [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    metadata = wheel.read(entry_points.replace("entry_points.txt", "METADATA")).decode()
    assert re.search(r"^License(-Expression)?: Apache-2\.0$", metadata, re.MULTILINE)
    assert re.search(
        r"^Requires-Dist: nvidia-resiliency-ext>=0\.6; extra == \"nvrx\"$", metadata, re.M
    )


def test_ci_pins_what_it_installs_by_name(wheel):
    """Also the other way round: a pin of nothing that is asked for would go stale unseen."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    asked = set()
    for text in re.findall(r"^Requires-Dist: (.+)$", wheel.read(metadata).decode(), re.MULTILINE):
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": name}) for name in ("dev", "tools")):
            asked.add(canonicalize_name(requirement.name))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {canonicalize_name(pin.name) for pin in pins} == asked
    assert all(str(pin.specifier).startswith("==") for pin in pins)


@pytest.fixture
def find_python(tmp_path):
    """Runs tools/find_python.sh where only the given Pythons exist.

    A Python is given as path below the home directory (`bin/` is on PATH) and whether it works.
    """
    for name in ("bash", "cat"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))

    def find_python(pythons: dict[str, bool], **variables: str) -> subprocess.CompletedProcess:
        for path, works in pythons.items():
            python = tmp_path / path
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text(f"#!{shutil.which('sh')}\nexit {0 if works else 1}\n")
            python.chmod(0o755)
        return subprocess.run(
            ["bash", ROOT / "tools/find_python.sh"],
            env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
        )

    return find_python


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"bin/python3.12": True, "bin/python3": True}, "bin/python3.12"),
        # A pyenv shim that only fails.
        (
            {"bin/python3.12": False, ".pyenv/versions/3.12.7/bin/python": True},
            ".pyenv/versions/3.12.7/bin/python",
        ),
        ({"bin/python3.12": False, "bin/python3": True}, "bin/python3"),
        ({"bin/python3": False, "bin/python3.13": True}, "bin/python3.13"),
    ],
)
def test_a_python_that_runs_is_found(find_python, tmp_path, pythons, found):
    done = find_python(pythons)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / found}\n")


def test_pyenv_may_live_elsewhere(find_python, tmp_path):
    done = find_python({"opt/versions/3.12.1/bin/python": True}, PYENV_ROOT=str(tmp_path / "opt"))
    assert done.stdout == f"{tmp_path}/opt/versions/3.12.1/bin/python\n"


def test_the_python_that_is_named_is_taken_or_refused(find_python, tmp_path):
    pythons = {"bin/python3.12": True, "mine": True, "old": False}
    assert find_python(pythons, PYTHON=str(tmp_path / "mine")).stdout == f"{tmp_path / 'mine'}\n"
    refused = find_python(pythons, PYTHON=str(tmp_path / "old"))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"PYTHON={tmp_path / 'old'} is not" in refused.stderr


def test_without_a_python_it_says_what_to_do(find_python):
    done = find_python({"bin/python3": False})
    assert (done.returncode, done.stdout) == (1, "")
    assert "PYTHON=/path/to/python3.12" in done.stderr


def test_the_real_check_knows_versions(tmp_path):
    """The stand-ins above decide by themselves; this Python is judged by the script's own check."""
    done = subprocess.run(
        ["bash", ROOT / "tools/find_python.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{sys.executable}\n"


def test_make_without_a_target_lists_the_targets():
    done = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True)
    for target in ("install", "demo", "test", "test-fast", "lint", "bench", "clean"):
        assert re.search(rf"^  make {target} +\S", done.stdout, re.MULTILINE)


def test_make_runs_every_folder_of_tests():
    makefile = (ROOT / "Makefile").read_text()
    (folders,) = re.findall(r"^TEST_DIRS := .*addprefix tests/,([a-z ]+)\)", makefile, re.M)
    tests = ROOT / "tests"
    with_tests = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    assert with_tests <= set(folders.split())


def test_files_of_tests_have_different_names():
    """pytest cannot collect two of one name together, as `make test-fast` does."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_ci_runs_the_test_command():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert commands[-1] == "make test"


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_stop_at_errors(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


def test_the_container_build_copies_what_is_there_and_not_ignored():
    dockerfile = (ROOT / "Dockerfile").read_text()
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists()
            assert source in allowed


def test_the_image_wins_over_our_pins():
    path = ROOT / "tools/merge_constraints.py"
    spec = importlib.util.spec_from_file_location("merge_constraints", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    image = "torch==2.12.0a0+5c3f1b7.nv26.06\nTransformer_Engine==2.15\n"
    ours = (
        "# tested with\ntorch==2.11.0\ntransformer-engine==2.9\nmegatron-core==0.19.2  # base\n\n"
    )
    assert module.merge(image, ours) == [
        "megatron-core==0.19.2",
        "torch==2.12.0a0+5c3f1b7.nv26.06",
        "Transformer_Engine==2.15",
    ]
