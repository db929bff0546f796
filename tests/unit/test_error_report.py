"""Errors at the top of a script, where nothing can catch them."""

import subprocess
import sys

import pytest

from megatron_resilient import error_report, plugin
from megatron_resilient.errors import ConfigError, PatchDriftError


def script(error: str, **environment: str) -> subprocess.CompletedProcess:
    program = (
        "import sys\n"
        "sys.argv = ['/somewhere/pretrain.py']\n"
        "from megatron_resilient import error_report, errors\n"
        "error_report.show_uncaught()\n"
        f"raise {error}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"LOCAL_RANK": "0", **environment},
        timeout=60,
    )


def test_an_uncaught_error_of_ours_is_no_traceback():
    done = script("errors.PatchDriftError('drifted\\nthe diff')", RANK="5")
    assert done.stderr == "pretrain.py: rank 5: PatchDriftError: drifted\nthe diff\n"
    assert done.returncode == 1


def test_wrong_usage_is_told_once_a_node():
    done = script("errors.ConfigError('no')")
    assert (done.stderr, done.returncode) == ("pretrain.py: ConfigError: no\n", 2)
    done = script("errors.ConfigError('no')", LOCAL_RANK="1")
    assert (done.stderr, done.returncode) == ("", 2)


@pytest.mark.parametrize(
    ("error", "environment"),
    [
        ("ValueError('theirs')", {}),
        ("errors.ConfigError('no')", {error_report.DEBUG_VARIABLE: "1"}),
    ],
)
def test_tracebacks_of_others_and_when_asked_for(error, environment):
    done = script(error, **environment)
    assert done.stderr.startswith("Traceback")
    assert done.returncode == 1


@pytest.fixture
def any_process(monkeypatch):
    """Others may have imported Megatron here, which enable() refuses."""
    monkeypatch.setattr(plugin, "_groups", lambda device: ("core",))


@pytest.mark.parametrize("error", [ConfigError("no"), PatchDriftError("drifted")])
def test_enable_can_still_be_caught(monkeypatch, any_process, error):
    def failing(groups):
        raise error

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(plugin.apply, "enable", failing)
    before = sys.excepthook
    with pytest.raises(type(error)):
        plugin.enable("cpu")
    assert sys.excepthook is not before


def test_enable_that_works_leaves_the_hook_alone(monkeypatch, any_process):
    monkeypatch.setattr(plugin.apply, "enable", lambda groups: None)
    before = sys.excepthook
    plugin.enable("cpu")
    assert sys.excepthook is before
