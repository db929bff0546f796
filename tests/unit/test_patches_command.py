"""`megatron-resilient patches`, on a fake upstream."""

import argparse
import json
import shutil

import pytest

from megatron_resilient.commands import patches as command
from megatron_resilient.errors import PatchError
from megatron_resilient.patching import apply
from megatron_resilient.patching.registry import Registry, Reliance
from tests.support.fake_upstream import FakeUpstream, patch, plus

SCALE = patch(
    "scale",
    "fakeup.ops:scale",
    plus(1),
    bound_in=("fakeup.late:rescale", "fakeup.user:scale"),
    versions=">=1,<2",
)
RUN = patch("run", "fakeup.ops:Engine.run", plus(1), group="fixes", kind="replace")
BASE = Reliance("fakeup.ops:Base", "A test reads it | twice.", "fakeup")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    fake = FakeUpstream(tmp_path / "site")
    monkeypatch.syspath_prepend(fake.site)
    monkeypatch.setattr(apply, "lock_file", lambda: tmp_path / "patches.lock")
    use(monkeypatch, fake.registry(SCALE, RUN, relies=(BASE,)))
    run("lock")
    yield fake
    fake.unload()


def use(monkeypatch, registry: Registry) -> None:
    monkeypatch.setattr(apply, "default_registry", lambda: registry)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(arguments))


def test_lock_says_what_it_did(upstream, tmp_path, monkeypatch, capsys):
    capsys.readouterr()
    upstream.edit("ops.py", "x + 1", "x + 3")
    use(monkeypatch, upstream.registry(RUN, patch("cached", "fakeup.ops:cached", plus(1))))
    assert run("lock") == 0
    assert capsys.readouterr().out.splitlines() == [
        "+ fakeup.ops:cached",
        "- fakeup.ops:Base",
        "- fakeup.ops:scale",
        "~ fakeup.ops:Engine.run",
        f"{tmp_path / 'patches.lock'}: 2 targets, 1 added, 2 removed, 1 changed",
    ]
    assert run("lock") == 0
    assert capsys.readouterr().out.endswith("0 added, 0 removed, 0 changed\n")


def test_check_ok(upstream, capsys):
    capsys.readouterr()
    assert run("check") == 0
    assert capsys.readouterr().out == "3 patches and reliances on fakeup 1.0: ok\n"
    assert run("check", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["upstreams"] == {"fakeup": "1.0"}
    assert document["problems"] == []
    assert [each["state"] for each in document["findings"]] == ["ok"] * 3


def test_check_shows_drift(upstream, capsys):
    upstream.edit("ops.py", "x * factor", "x + factor")
    capsys.readouterr()
    assert run("check") == 1
    shown = capsys.readouterr().out
    assert "core.scale (fakeup.ops:scale): drifted: code changed since fakeup 1.0" in shown
    assert "- <line 9 of fakeup 1.0, text not stored>\n+     return x + factor\n" in shown
    assert shown.endswith("fakeup 1.0: 1 not as locked, 0 other problems\n")
    assert run("check", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [bool(each["diff"]) for each in document["findings"]] == [True, False, False]


def test_check_shows_what_else_is_wrong(upstream, monkeypatch, capsys):
    (upstream.package / "new.py").write_text("from fakeup.ops import scale\n")
    use(monkeypatch, upstream.registry(SCALE, relies=(BASE,)))
    capsys.readouterr()
    assert run("check") == 1
    assert capsys.readouterr().out.splitlines() == [
        "core.scale: fakeup.new:scale holds what fakeup.ops:scale defines; add it to bound_in",
        "fakeup.ops:Engine.run: in patches.lock, but no patch or reliance names it; run "
        "`megatron-resilient patches lock`",
        "2 patches and reliances on fakeup 1.0: 0 not as locked, 2 other problems",
    ]


def test_groups_that_are_not_asked_for_are_not_looked_at(upstream, capsys):
    """The alias of `core.scale` is gone, its code is another one: both are told, or neither."""
    upstream.edit("ops.py", "x * factor", "x + factor")
    upstream.edit("user.py", "import scale", "import Base")
    capsys.readouterr()
    assert run("check") == 1
    assert "1 not as locked, 1 other problems" in capsys.readouterr().out
    assert run("check", "--groups", "fixes") == 0
    assert capsys.readouterr().out == "2 patches and reliances on fakeup 1.0: ok\n"
    assert run("check", "--groups", "fixes,core") == 1
    capsys.readouterr()
    assert run("list", "--groups", "fixes") == 0
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert names == ["target", "fakeup.ops:Engine.run", "fakeup.ops:Base"]


@pytest.mark.parametrize("groups", ["gpu", "fixes,", ""])
def test_unknown_groups_are_refused(upstream, groups):
    with pytest.raises(PatchError, match=r"--groups .*is not one of cpu, fixes, core"):
        run("check", "--groups", groups)


def test_check_without_upstream(upstream, capsys):
    shutil.rmtree(upstream.site / "fakeup-0.dist-info")
    capsys.readouterr()
    assert run("check") == 1
    assert "core.scale (fakeup.ops:scale): missing: fakeup is not installed" in (
        capsys.readouterr().out
    )


def test_check_without_lock(upstream, tmp_path):
    (tmp_path / "patches.lock").unlink()
    with pytest.raises(PatchError, match=r"patches\.lock is missing"):
        run("check")


def test_list(upstream, capsys):
    upstream.edit("ops.py", "def scale(", "def scale_by(")
    upstream.edit("ops.py", "x + 1", "x + 3")
    capsys.readouterr()
    assert run("list") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["id", "target", "kind", "range", "state"],
        ["core.scale", "fakeup.ops:scale", "wrap", ">=1,<2", "missing"],
        ["fixes.run", "fakeup.ops:Engine.run", "replace", ">=1,<2", "drifted"],
        ["-", "fakeup.ops:Base", "relies", "-", "ok"],
    ]
    assert run("list", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in document["patches"]] == ["core.scale", "fixes.run"]
    first = document["patches"][0]
    assert first["bound_in"] == ["fakeup.late:rescale", "fakeup.user:scale"]
    assert first["state"] == "missing"
    assert document["reliances"] == [
        {
            "target": "fakeup.ops:Base",
            "why": "A test reads it | twice.",
            "upstream": "fakeup",
            "state": "ok",
            "detail": "",
        }
    ]


def test_list_on_a_terminal(upstream, monkeypatch, capsys):
    capsys.readouterr()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "core.scale" in shown
    assert "fakeup.ops:Engine.run" in shown


def test_diff(upstream, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(upstream.site, copy)
    assert run("diff") == 0
    assert capsys.readouterr().err == "no difference\n"
    upstream.edit("ops.py", "x * factor", "x + factor")
    upstream.edit("ops.py", "x + 1", "x + 3")
    assert run("diff") == 1
    shown = capsys.readouterr().out
    assert "+     return x + factor" in shown
    assert "+         return x + 3" in shown
    assert run("diff", "fixes.run") == 1
    assert "factor" not in capsys.readouterr().out
    assert run("diff", "fakeup.ops:Base") == 0
    assert run("diff", "fixes.run", "--against", str(copy)) == 1
    assert "-        return x + 1\n+        return x + 3" in capsys.readouterr().out


def test_diff_of_versions_has_no_code_to_show(upstream, capsys):
    upstream.set_version("2.0")
    capsys.readouterr()
    assert run("diff", "fixes.run") == 1
    assert capsys.readouterr().out == (
        "fixes.run (fakeup.ops:Engine.run): drifted: fakeup 2.0 is outside >=1,<2\n"
    )


def test_diff_of_nothing_known(upstream, tmp_path):
    with pytest.raises(PatchError, match=r"no patch and no reliance is named core\.none"):
        run("diff", "core.none")
    with pytest.raises(PatchError, match="is not a directory"):
        run("diff", "--against", str(tmp_path / "nowhere"))


def test_docs(upstream, tmp_path, capsys):
    file = tmp_path / "patches.md"
    assert run("docs", "--output", str(file)) == 0
    text = file.read_text()
    assert text.startswith("<!-- Generated by `megatron-resilient patches docs`")
    assert text.index("## Group `fixes`") < text.index("## Group `core`")
    assert "Replaces `fakeup.ops:Engine.run` of fakeup >=1,<2." in text
    assert "Wraps `fakeup.ops:scale` of fakeup >=1,<2." in text
    assert "- Also bound as: `fakeup.late:rescale`, `fakeup.user:scale`" in text
    assert "| `fakeup.ops:Base` | A test reads it \\| twice. |" in text
