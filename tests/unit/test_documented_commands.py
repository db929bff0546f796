"""Every command of README.md, CONTRIBUTING.md and docs/ is run, or is parsed and tested elsewhere.

What is cheap is run as it stands, in a folder with the files that the page shows and with small
ones for its placeholders; what the page says that it prints is compared. Of what takes long, or
needs a cluster, flags are parsed, and a test that runs it is named here. What is neither fails.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from megatron_resilient import cli, config
from tests.support import checkpoints
from tests.support.docs_commands import PAGES, ROOT, Shown, files_of, shown_commands
from tests.support.synthetic_run import write_synthetic_run

# Run as they are. `checkpoint diff` answers 1 where two checkpoints differ, as these do.
STATUS = {
    "plan": 0,
    "schedule": 0,
    "simulate": 0,
    "report": 0,
    "doctor": 0,
    "prepare-data": 0,
    "patches list": 0,
    "patches check": 0,
    "patches diff": 0,
    "checkpoint ls": 0,
    "checkpoint verify": 0,
    "checkpoint gc": 0,
    "checkpoint diff": 1,
}
# Parsed here; run by these.
RUN_BY = {
    "run": "faults/test_elastic_job.py::test_a_node_and_the_coordinator_are_killed_at_once",
    "coordinator": "unit/test_coordinator.py::test_training_goes_on_through_a_restart_at_the_same",
    "status": "unit/test_coordinator.py::test_status_and_leave",
    "leave": "unit/test_coordinator.py::test_status_and_leave",
    "metrics": "unit/test_metrics.py::test_prometheus_gets_them_over_http_while_the_run_goes_on",
    "checkpoint consolidate": "gloo/test_consolidate.py::test_the_command_killed_and_run_again",
    "patches lock": "unit/test_patches_command.py::test_lock_says_what_it_did",
    "patches docs": "unit/test_patches_command.py::test_docs",
    "make demo": "gloo/test_demo_smoke.py::test_demo_is_killed_resumes_exactly_and_reports",
    "sbatch": "unit/test_slurm.py::test_each_node_is_checked_then_starts_one_torchrun",
    "kubectl": "unit/test_kubernetes.py::test_commands_are_what_the_program_takes",
    "quickstart.sh": "gloo/test_example_scripts.py::test_quickstart_trains_on_ones_own_text",
    "mixtral_like.sh": "gloo/test_example_scripts.py::test_small_size_trains",
    "deepseek_like.sh": "gloo/test_example_scripts.py::test_small_size_trains",
    "qwen_like.sh": "gloo/test_example_scripts.py::test_small_size_trains",
}
# Of the system, not ours; and one that would write into .git.
NOT_OURS = ("apt-get install iproute2", "source .venv/bin/activate")

WORDS = {
    "RUN_DIR": "demo_run/run",
    "DIR": "demo_run/run/checkpoints",
    "OUT": "out",
    "runs/first": "demo_run/run",
    "SCRIPT": "script.py",
    "PATH...": "text",
    "PREFIX": "corpus",
    "MIN": "60",
    "N": "4",
    "C": "32",
    "H": "5",
    "STEPS": "20",
    "ID": "node3",
    "HOST:29400": "head:29400",
    "HOST:PORT": "head:29400",
    "MIN:MAX": "2:4",
}
WORDS_OF_FLAGS = {
    ("--loads", "FILE"): "loads.json",
    ("--loads", "PATH"): "demo_run/run",
    ("--profile", "FILE"): "profile.json",
    ("--layers", "FILE"): "layers.json",
    ("--trace", "FILE"): "spot.csv",
    ("--topology", "FILE"): "topology.json",
    ("--token-file", "FILE"): "token",
    ("--calibration", "PATH"): "demo_run/run",
    ("--train-tokenizer", "N"): "1000",
}
LEFT_OUT = ("...", "FLAGS", "ARGS...")

SHOWN = [shown for page in PAGES for shown in shown_commands(page)]
# The same words on several pages are one case, unless a page says what they print.
CASES = {(shown.text, shown.output, shown.short): shown for shown in reversed(SHOWN)}


def words_of(text: str) -> list[str]:
    """Returns a command's words with values for placeholders; `[OPTIONAL]` words are left out."""
    words: list[str] = []
    for word in shlex.split(text):
        if word in LEFT_OUT or re.fullmatch(r"\[[A-Z_]+\]", word):
            continue
        flag = words[-1] if words else ""
        words.append(WORDS_OF_FLAGS.get((flag, word), WORDS.get(word, word)))
    return words


def unknown_placeholders(words: list[str]) -> list[str]:
    return [word for word in words if re.fullmatch(r"[A-Z][A-Z_:]*(?:\.\.\.)?", word)]


def has_test(name: str) -> bool:
    path, _, function = RUN_BY[name].partition("::")
    return f"\ndef {function}" in (ROOT / "tests" / path).read_text()


def command_name(words: list[str]) -> str:
    """`plan`, or with its action, `checkpoint gc`."""
    actions = words[0] in ("checkpoint", "patches")
    return " ".join(words[: 2 if actions and len(words) > 1 else 1])


def kind_of(shown: Shown) -> str:
    """Says how a command is tested."""
    words = [word for word in shlex.split(shown.text) if not re.match(r"[A-Z_]+=|sudo$", word)]
    if not words:
        return "unknown"
    program, rest = words[0], words[1:]
    if program == "megatron-resilient":
        return _kind_of_ours(shown, rest)
    if program == "make":
        return "make"
    if shown.text in NOT_OURS:
        return "not ours"
    if program == "head":
        return "shell"
    if program.endswith((".sh", ".sbatch")) or program in ("sbatch", "kubectl"):
        return "elsewhere"
    if program in ("pip", ".venv/bin/pre-commit"):
        return "installed"
    if program in ("torchrun", "python", ".venv/bin/python") or program.endswith(".py"):
        return "parsed"
    return "unknown"


def _kind_of_ours(shown: Shown, rest: list[str]) -> str:
    if not rest or rest in ([name] for name in cli.COMMANDS):
        return "named" if not rest or rest[0] != "doctor" else "run"
    if len(rest) == 2 and rest[0] == "checkpoint":
        return "named"
    short = shown.short and not unknown_placeholders(rest)
    if ("..." in rest and rest[0] == "prepare-data") or short:
        return "named"
    name = command_name(rest)
    return "run" if name in STATUS else "elsewhere" if name in RUN_BY else "unknown"


def cases(kind: str, *marks):
    found = [shown for shown in CASES.values() if kind_of(shown) == kind]
    found.sort(key=lambda shown: (shown.page, shown.line))
    assert found, f"no command is {kind}: this test would hold nothing"
    return [
        pytest.param(
            shown,
            id=f"{shown.page}:{shown.line} {shown.text[:50]}",
            marks=[*marks, *([pytest.mark.slow] if "--nodes 1000" in shown.text else [])],
        )
        for shown in found
    ]


def test_every_command_has_a_test():
    unknown = [f"{s.page}:{s.line} {s.text}" for s in CASES.values() if kind_of(s) == "unknown"]
    assert not unknown
    assert all(map(has_test, RUN_BY)), [name for name in RUN_BY if not has_test(name)]
    # A page that none is found on any more would be held by nothing.
    assert {shown.page for shown in SHOWN} >= {
        *("README.md", "CONTRIBUTING.md", "docs/elastic.md", "docs/simulation.md"),
        *("docs/operations.md", "docs/tuning.md", "docs/troubleshooting.md"),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a run, checkpoints, text, and the files that pages show."""
    folder = tmp_path_factory.mktemp("prepared")
    run = folder / "demo_run" / "run"
    (run / "checkpoints").mkdir(parents=True)
    write_synthetic_run(run, steps=400, layers=2, experts=16, nodes=4)
    checkpoints.series(run / "checkpoints")
    (folder / "text").mkdir()
    for page in PAGES:
        shutil.copy(page, folder / "text" / f"{page.stem}.txt")
    shown = [files_of(page) for page in PAGES]
    for files in shown:
        for name, text in files.items():
            (folder / name).write_text(text)
    assert {name for files in shown for name in files} >= set(WORDS_OF_FLAGS.values()) & {
        *("loads.json", "profile.json", "layers.json", "spot.csv")
    }
    return folder


@pytest.fixture
def here(prepared, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("shown", cases("run"))
def test_commands_run_and_print_what_the_page_shows(shown, here, capsys):
    for name, text in files_of(ROOT / shown.page).items():
        Path(name).write_text(text)
    words = words_of(shown.text)[1:]
    assert not unknown_placeholders(words)
    if "--help" in words:
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 0
        return
    name = command_name(words)
    status = cli.main(words)
    captured = capsys.readouterr()
    assert status == STATUS[name], captured.err
    printed = captured.err + captured.out
    assert printed
    if shown.output is not None:
        assert without_times(printed) == without_times(shown.output)


def without_times(text: str) -> list[str]:
    kept = re.sub(r"in [\d.]+ s\b", "in .. s", text)
    return [line.rstrip() for line in kept.splitlines() if line.strip()]


@pytest.mark.parametrize("shown", cases("elsewhere"))
def test_what_takes_long_is_parsed_and_run_by_another_test(shown):
    words = [word for word in words_of(shown.text) if not re.match(r"[A-Z_]+=", word)]
    program, rest = words[0], words[1:]
    if program != "megatron-resilient":
        files = [word for word in words if word.startswith("examples/")]
        assert all((ROOT / name).is_file() for name in files), files
        script = Path(files[0]).name if program not in ("sbatch", "kubectl") else program
        assert has_test(script)
        return
    assert not unknown_placeholders(rest)
    assert has_test(command_name(rest))
    args = cli.build_parser().parse_args(rest)
    if args.command == "run":
        assert args.script == "script.py" or (ROOT / args.script).is_file()
        parser = argparse.ArgumentParser(allow_abbrev=False)
        config.add_flags(parser)
        _, others = parser.parse_known_args(args.arguments)
        assert not [word for word in others if word.startswith("--resilient")]


@pytest.mark.parametrize("shown", cases("named"))
def test_commands_actions_and_flags_that_are_named_exist(shown):
    """Short forms, which leave out what is required."""
    parser, words = cli.build_parser(), shlex.split(shown.text)[1:]
    while (choices := subparsers(parser)) and words and words[0] in choices:
        parser, words = choices[words[0]], words[1:]
    if subparsers(parser):
        assert not words, f"{shown.text}: no such command or action"
    options = {option for action in parser._actions for option in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= options


def subparsers(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return None


@pytest.mark.parametrize("shown", cases("make"))
def test_make_targets(shown):
    """What they would run, by make itself, with the variables of the page."""
    done = subprocess.run(
        ["make", "-n", *shlex.split(shown.text)[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.fixture(scope="module")
def parsed():
    """{command: None, or what is wrong with it}, all of them by one process."""
    lines = {}
    for param in cases("parsed"):
        text = param.values[0].text
        words = [word for word in words_of(text) if not re.match(r"[A-Z_]+=|sudo$", word)]
        if words[0] in ("python", ".venv/bin/python"):
            words = words[1:]
        if words[0] == "-m":
            words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
        if words[0] in ("pretrain_moe.py", "examples/pretrain_moe.py"):
            words = ["training", *words[1:]]
        elif words[0] == "testbed.py":
            words = ["tools/testbed.py", *words[1:]]
        lines[text] = [words[0], words[1:]]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.parse_only"],
        input=json.dumps(list(lines.values())),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shown", cases("parsed"))
def test_scripts_take_the_flags_of_the_page(shown, parsed):
    """Benchmarks, tools and training scripts: everything up to what they are for."""
    words = shlex.split(shown.text)
    wrong = parsed[shown.text]
    if len(words) == 1:  # a name in a text: of what requires more, or is no program, perhaps
        path = ROOT / ("tools/testbed.py" if words[0] == "testbed.py" else words[0])
        assert path.is_file()
        if "parse_args" not in path.read_text() or "arguments are required" in str(wrong):
            return
    assert wrong is None


@pytest.mark.parametrize("shown", cases("shell"))
def test_lines_of_a_shell(shown, tmp_path):
    subprocess.run(["bash", "-euo", "pipefail", "-c", shown.text], cwd=tmp_path, check=True)
    token = tmp_path / "token"
    assert len(token.read_text().strip()) >= 32
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("shown", cases("installed"))
def test_what_pip_is_to_install_is_declared(shown):
    extras = set(metadata.metadata("megatron-resilient").get_all("Provides-Extra"))
    asked = re.findall(r"\[([\w,]+)\]", shown.text)
    assert {extra for group in asked for extra in group.split(",")} <= extras
    if not asked:
        program = Path(shlex.split(shown.text)[0]).name
        required = metadata.requires("megatron-resilient")
        assert any(re.match(rf"{program}\b", line) for line in required), program


def test_a_fenced_block_in_yaml_is_yaml():
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.M | re.S):
            assert yaml.safe_load(block)


def test_the_example_of_events_runs(tmp_path, monkeypatch):
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/telemetry.md").read_text(), re.M | re.S
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/telemetry.md", "exec"), {})
    assert (tmp_path / "runs/a/summary.json").is_file()


def test_what_finds_commands_finds_them(tmp_path):
    """In blocks with prompts and without, in text, and over the ends of lines."""
    path = ROOT / "tests" / "support" / "docs_commands.py"
    spec = importlib.util.spec_from_file_location("docs_commands_of_a_page", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    page = tmp_path / "page.md"
    page.write_text(
        "Use `make x`, `plan --loads A\nB` or `run`; `x.json` is:\n\n"
        '```json\n{"a": 1}\n```\n\n'
        "```\n$ megatron-resilient report A \\\n    B   # why\nprinted\n  more\n```\n\n"
        "```\nmake y   # why\n# because\ncurl z\n```\n\n```\nno command\n```\n\n"
        "```\nmake:\n  $ megatron-resilient doctor\n```\n"
    )
    found = [(s.line, s.text, s.output, s.short) for s in module.shown_commands(page)]
    assert found == [
        (8, "megatron-resilient report A B", "printed\n  more", False),
        (15, "make y", None, False),
        (15, "curl z", None, False),
        (25, "megatron-resilient doctor", None, False),
        (1, "make x", None, False),
        (1, "megatron-resilient plan --loads A B", None, True),
    ]
    assert module.files_of(page) == {"x.json": '{"a": 1}\n'}
