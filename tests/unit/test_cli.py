"""The `megatron-resilient` program as a whole; each command has tests of its own."""

import importlib
import re
import subprocess
import sys

import pytest

from megatron_resilient import __version__, cli
from megatron_resilient.commands import doctor
from megatron_resilient.errors import ConfigError

HEAVY = ("torch", "megatron", "numpy", "scipy", "rich", "sentencepiece", "matplotlib")


def program(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megatron_resilient.cli", *arguments],
        capture_output=True,
        text=True,
    )


def test_help_names_every_command_and_imports_nothing_heavy():
    done = program("--help")
    assert done.returncode == 0
    for command in cli.COMMANDS:
        assert re.search(rf"^    {command}\s", done.stdout, re.MULTILINE)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported.intersection(HEAVY)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main([command, "--help"])
    assert leaving.value.code == 0
    module = importlib.import_module(f"megatron_resilient.commands.{command.replace('-', '_')}")
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(module.__doc__.split()) in shown
    assert module.HELP


@pytest.mark.parametrize(
    "arguments",
    [[], ["recover"], ["doctor", "--jsom"], ["doctor", "--js"], ["doctor", "extra"]],
)
def test_wrong_usage_ends_with_2_and_says_how_it_is_used(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert leaving.value.code == 2
    assert "usage: megatron-resilient" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"megatron-resilient {__version__}\n"


@pytest.mark.parametrize("error", [ConfigError("no loads in loads.json"), OSError("disk full")])
def test_an_error_is_one_line_unless_asked_for_more(monkeypatch, capsys, error):
    def fail(args):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"megatron-resilient doctor: {error}\n"
    with pytest.raises(type(error)):
        cli.main(["doctor", "--debug"])


def test_an_answer_becomes_the_exit_status(monkeypatch):
    for answer in (0, 1):
        monkeypatch.setattr(doctor, "run", lambda args, answer=answer: answer)
        assert cli.main(["doctor"]) == answer


def test_no_memory_and_ctrl_c_are_no_tracebacks(monkeypatch, capsys):
    def fail(args):
        raise MemoryError("Unable to allocate 72 GiB")

    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "megatron-resilient doctor: out of memory: ask for less: Unable to allocate 72 GiB\n"
    )
    monkeypatch.setattr(doctor, "run", stop)
    assert cli.main(["doctor"]) == 130
    assert not capsys.readouterr().err
