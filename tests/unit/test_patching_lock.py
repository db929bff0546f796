"""patches.lock, verification against it, and how drift is shown."""

import json
import shutil

import pytest

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.lock import Lock
from megatron_resilient.patching.registry import Registry, Reliance
from megatron_resilient.patching.report import diff, full_diff, has_diff
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.verify import Finding, verify
from tests.support.fake_upstream import FakeUpstream, patch, plus


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    fake = FakeUpstream(tmp_path / "site")
    monkeypatch.syspath_prepend(fake.site)
    yield fake
    fake.unload()


@pytest.fixture
def registry(upstream):
    return upstream.registry(
        patch("scale", "fakeup.ops:scale", plus(1)),
        relies=(Reliance("fakeup.ops:Engine", "a test", "fakeup"),),
    )


def look(registry: Registry, lock: Lock) -> dict[str, Finding]:
    return {finding.name: finding for finding in verify(registry, lock, SourceTree())}


def test_what_was_locked_is_ok(upstream, registry):
    found = look(registry, upstream.lock(registry))
    assert {name: each.state for name, each in found.items()} == {
        "core.scale": "ok",
        "fakeup.ops:Engine": "ok",
    }


def test_file_keeps_everything_and_no_source(upstream, registry, tmp_path):
    file = tmp_path / "patches.lock"
    lock = upstream.lock(registry)
    lock.write(file)
    assert Lock.read(file) == lock
    text = file.read_text()
    document = json.loads(text)
    assert list(document["targets"]) == ["fakeup.ops:Engine", "fakeup.ops:scale"]
    scale = document["targets"]["fakeup.ops:scale"]
    assert (scale["file"], scale["line"], scale["version"]) == ("fakeup/ops.py", 6, "1.0")
    assert len(scale["lines"].split()) == 2
    assert "return" not in text
    assert "factor" not in text
    Lock.read(file).write(tmp_path / "again")
    assert (tmp_path / "again").read_text() == text


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 9, "targets": {}}', "no json"]
)
def test_damaged_file_is_named(tmp_path, text):
    file = tmp_path / "patches.lock"
    file.write_text(text)
    with pytest.raises(PatchError, match=r"patches\.lock (is damaged|has format 9).*patches lock"):
        Lock.read(file)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(PatchError, match="is missing: run `megatron-resilient patches lock`"):
        Lock.read(tmp_path / "patches.lock")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # a comment\n", ""),
        ('    """Scales."""\n', '    """Scales,\n\n    and so on.\n    """\n'),
        ('"""Operations."""', '"""Operations, with a longer\n\ntext."""'),
        ("return x * factor", "return  x*factor  # product"),
        ("LIMIT = 10", "LIMIT = 11"),
    ],
)
def test_harmless_edits_are_ok(upstream, registry, old, new):
    lock = upstream.lock(registry)
    upstream.edit("ops.py", old, new)
    assert {each.state for each in look(registry, lock).values()} == {"ok"}


@pytest.mark.parametrize(
    ("old", "new", "name", "detail"),
    [
        ("x * factor", "x + factor", "core.scale", "code changed since fakeup 1.0"),
        ("factor=2", "factor=3", "core.scale", "signature and code changed since fakeup 1.0"),
        ("return x + 2", "return x - 2", "fakeup.ops:Engine", "code changed since fakeup 1.0"),
    ],
)
def test_other_code_is_drift(upstream, registry, old, new, name, detail):
    lock = upstream.lock(registry)
    upstream.edit("ops.py", old, new)
    found = look(registry, lock)
    assert {each.name for each in found.values() if each.state == "drifted"} == {name}
    assert found[name].detail == detail


def test_removed_name_is_missing(upstream, registry):
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "def scale(", "def scale_by(")
    found = look(registry, lock)["core.scale"]
    assert (found.state, found.detail) == ("missing", "was in fakeup/ops.py of fakeup 1.0")


def test_moved_code_behind_a_reexport_is_ok(upstream, registry):
    lock = upstream.lock(registry)
    shutil.move(upstream.package / "ops.py", upstream.package / "moved.py")
    (upstream.package / "ops.py").write_text("from .moved import *\n")
    assert {each.state for each in look(registry, lock).values()} == {"ok"}


def test_unlocked_name(registry):
    assert look(registry, Lock())["core.scale"].state == "unlocked"


@pytest.mark.parametrize(
    ("version", "state"), [("1.5", "ok"), ("1.5+cpu", "ok"), ("1.5a0", "ok"), ("2.0", "drifted")]
)
def test_versions(upstream, registry, version, state):
    lock = upstream.lock(registry)
    upstream.set_version(version)
    found = look(registry, lock)["core.scale"]
    assert found.state == state
    if state == "drifted":
        assert found.detail == "fakeup 2.0 is outside >=1,<2"


def test_upstream_that_is_not_installed(upstream, registry):
    lock = upstream.lock(registry)
    shutil.rmtree(upstream.site / "fakeup-0.dist-info")
    found = look(registry, lock)["core.scale"]
    assert (found.state, found.detail) == ("missing", "fakeup is not installed")
    with pytest.raises(PatchError, match="fakeup is not installed"):
        upstream.lock(registry)


def test_builtins_are_locked_by_version_only(upstream):
    upstream.edit("__init__.py", "", "from math import sin\n")
    registry = upstream.registry(patch("sin", "fakeup:sin", plus(1)))
    lock = upstream.lock(registry)
    assert lock.targets["fakeup:sin"].source is None
    assert look(registry, lock)["core.sin"].state == "ok"
    upstream.edit("__init__.py", "from math import sin\n", "def sin(x): ...\n")
    found = look(registry, lock)["core.sin"]
    assert (found.state, found.detail) == ("drifted", "was a builtin in fakeup 1.0")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("fakeup.ops:nothing", "does not exist"),
        ("fakeup.nothing:x", "does not exist"),
        ("fakeup.ops:functools", "is a module"),
        ("fakeup.ops:Engine.inherited", r"name the place where it is, fakeup\.ops:Base\.inherited"),
    ],
)
def test_what_cannot_be_locked(upstream, target, message):
    with pytest.raises(PatchError, match=message):
        upstream.lock(upstream.registry(patch("one", target, plus(1))))


def test_diff_shows_new_text_and_places_of_old_text(upstream, registry):
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "    return x * factor", "    y = x + \\\n        factor\n    return y")
    upstream.set_version("1.1")
    found = look(registry, lock)["core.scale"]
    assert diff(found) == (
        "--- fakeup/ops.py (fakeup 1.0)\n"
        "+++ fakeup/ops.py (fakeup 1.1)\n"
        "@@ from line 6 in 1.0, from line 6 now @@\n"
        "  def scale(x, factor=2):\n"
        "- <line 9 of fakeup 1.0, text not stored>\n"
        "+     y = x + \\\n"
        "+         factor\n"
        "+     return y\n"
    )


def test_diff_needs_something_to_compare(upstream, registry):
    found = look(registry, upstream.lock(registry))["core.scale"]
    assert not has_diff(found)
    with pytest.raises(PatchError, match=r"core\.scale has no code to compare"):
        diff(look(registry, Lock())["core.scale"])


def test_full_diff_against_an_unpacked_copy(upstream, registry, tmp_path):
    lock = upstream.lock(registry)
    copy = tmp_path / "copy"
    shutil.copytree(upstream.site, copy)
    upstream.edit("ops.py", "x * factor", "x + factor")
    upstream.edit("ops.py", "# a comment", "# another comment")
    found = look(registry, lock)["core.scale"]
    assert full_diff(found, SourceTree([str(copy)])).splitlines() == [
        "--- fakeup/ops.py (fakeup 1.0)",
        "+++ fakeup/ops.py (fakeup 1.0)",
        "@@ -1,4 +1,4 @@",
        " def scale(x, factor=2):",
        '     """Scales."""',
        "-    # a comment",
        "-    return x * factor",
        "+    # another comment",
        "+    return x + factor",
    ]


def test_copy_must_be_the_locked_version(upstream, registry, tmp_path):
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "x * factor", "x + factor")
    found = look(registry, lock)["core.scale"]
    with pytest.raises(PatchError, match=r"is not the locked code of fakeup 1\.0"):
        full_diff(found, SourceTree([str(upstream.site)]))
    with pytest.raises(PatchError, match="does not hold"):
        full_diff(found, SourceTree([str(tmp_path)]))
