"""`run`: how a training script ends, and what it says."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_resilient import error_report
from megatron_resilient.errors import CheckpointError, ConfigError, PatchDriftError
from megatron_resilient.mcore import main

HOOKS = "megatron_resilient.mcore.train_hooks"


def raising(error: BaseException):
    def main_function():
        raise error

    return main_function


@pytest.fixture
def closed(monkeypatch):
    """The exit codes with which the run's record was closed; rank 3 of 8, second node."""
    codes = []
    monkeypatch.setitem(sys.modules, HOOKS, SimpleNamespace(close=codes.append))
    monkeypatch.setattr(sys, "argv", ["/somewhere/pretrain.py", "--lr", "1"])
    monkeypatch.delenv(error_report.DEBUG_VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return codes


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--lr 1: no"), 2, "pretrain.py: ConfigError: --lr 1: no\n"),
        (CheckpointError("damaged"), 1, "pretrain.py: rank 3: CheckpointError: damaged\n"),
        (PatchDriftError("drifted"), 1, "pretrain.py: rank 3: PatchDriftError: drifted\n"),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_status(closed, capsys, error, code, line):
    with pytest.raises(SystemExit) as stop:
        main.run(raising(error))
    assert stop.value.code == code
    assert closed == [code]
    assert capsys.readouterr() == ("", line)


def test_wrong_usage_is_told_once_a_node(closed, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        main.run(raising(ConfigError("--lr 1: no")))
    assert stop.value.code == 2
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        main.run(raising(CheckpointError("damaged")))
    assert capsys.readouterr().err == "pretrain.py: rank 3: CheckpointError: damaged\n"
    assert closed == [2, 1]


def test_without_a_launcher_it_is_rank_0(closed, capsys, monkeypatch):
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    for error in (ConfigError("a"), CheckpointError("b")):
        with pytest.raises(SystemExit):
            main.run(raising(error))
    assert capsys.readouterr().err == (
        "pretrain.py: ConfigError: a\npretrain.py: rank 0: CheckpointError: b\n"
    )


@pytest.mark.parametrize("value", ["1", "yes"])
def test_the_traceback_is_for_those_who_ask(closed, capsys, monkeypatch, value):
    monkeypatch.setenv(error_report.DEBUG_VARIABLE, value)
    with pytest.raises(CheckpointError):
        main.run(raising(CheckpointError("damaged")))
    assert closed == [1]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["", "0"])
def test_a_debug_variable_that_says_no(closed, monkeypatch, value):
    monkeypatch.setenv(error_report.DEBUG_VARIABLE, value)
    with pytest.raises(SystemExit):
        main.run(raising(CheckpointError("damaged")))


@pytest.mark.parametrize(
    ("code", "recorded"), [(None, 0), (0, 0), (3, 3), ("no more data", 1), ("", 1)]
)
def test_an_exit_passes_with_its_code(closed, capsys, code, recorded):
    with pytest.raises(SystemExit) as stop:
        main.run(raising(SystemExit(code)))
    assert stop.value.code == code
    assert closed == [recorded]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), KeyboardInterrupt()])
def test_other_exceptions_pass(closed, capsys, error):
    with pytest.raises(type(error)) as caught:
        main.run(raising(error))
    assert caught.value is error
    assert closed == [1]
    assert capsys.readouterr().err == ""


def test_success(closed):
    done = []
    assert main.run(lambda: done.append(True)) is None
    assert (done, closed) == ([True], [0])


def test_a_whole_process(tmp_path):
    """What a shell sees; torch was not needed to say that a flag is wrong."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import megatron_resilient\n"
        "from megatron_resilient.errors import ConfigError\n"
        "def main():\n"
        "    raise ConfigError('--lr 1: no')\n"
        "try:\n"
        "    megatron_resilient.run(main)\n"
        "finally:\n"
        "    assert not {'torch', 'megatron'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "script.py: ConfigError: --lr 1: no\n"
