"""Patches are applied all or none, and taken back without a trace."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.errors import PatchDriftError, PatchError
from megatron_resilient.patching import apply
from megatron_resilient.patching.registry import Patch, Reliance
from tests.support.fake_upstream import FakeUpstream, patch, plus

SCALE = "fakeup.ops:scale"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    fake = FakeUpstream(tmp_path / "site")
    monkeypatch.syspath_prepend(fake.site)
    monkeypatch.delenv(apply.ALLOW_DRIFT_VARIABLE, raising=False)
    yield fake
    apply.disable()
    fake.unload()


def snapshot() -> dict[tuple[str, str], int]:
    """Identity of every attribute of every loaded upstream module and of their classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fakeup":
            for attribute, value in vars(module).items():
                if attribute != "__builtins__":
                    found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    for inner, held in vars(value).items():
                        found[f"{name}:{attribute}", inner] = id(held)
    return found


def enable(upstream: FakeUpstream, *patches: Patch, **options):
    registry = upstream.registry(*patches)
    return apply.enable(["core"], registry=registry, lock=upstream.lock(registry), **options)


def test_apply_behave_revert_identity(upstream):
    ops, user = upstream.load("ops"), upstream.load("user")
    before = snapshot()
    applied = enable(
        upstream,
        patch("scale", SCALE, plus(1), bound_in=("fakeup.user:scale",)),
        patch("cached", "fakeup.ops:cached", plus(1)),
        patch("run", "fakeup.ops:Engine.run", plus(10)),
        patch("static", "fakeup.ops:Engine.static", plus(20)),
        patch("build", "fakeup.ops:Engine.build", plus(("more",))),
        patch("size", "fakeup.ops:Engine.size", lambda original: property(lambda self: 8)),
        patch("limit", "fakeup.ops:LIMIT", lambda original: original * 2, kind="replace"),
        patch("level", "fakeup.ops:Engine.level", lambda original: original + 1),
    )
    assert applied.groups == ("core",)
    assert applied.ids[:2] == ("core.scale", "core.cached")
    engine = ops.Engine()
    assert ops.scale(3) == user.use(3) == 7
    assert ops.cached(1) == 102
    assert engine.run(1) == 12
    assert ops.Engine.static(1) == engine.static(1) == 23
    assert ops.Engine.build(1) == engine.build(1) == ("Engine", 1, "more")
    assert engine.size == 8
    assert ops.LIMIT == 20
    assert engine.level == 4
    assert snapshot() != before
    apply.disable()
    assert snapshot() == before
    assert ops.scale(3) == user.use(3) == 6
    assert isinstance(vars(ops.Engine)["static"], staticmethod)


def test_subclasses_see_class_methods_of_their_own(upstream):
    ops = upstream.load("ops")
    enable(upstream, patch("build", "fakeup.ops:Engine.build", plus(("more",))))
    assert type("Sub", (ops.Engine,), {}).build(1) == ("Sub", 1, "more")


def test_inherited_builtin_is_unbound_again(upstream):
    upstream.edit("ops.py", "class Base:", "class Items(list):\n    pass\n\n\nclass Base:")
    ops = upstream.load("ops")
    before = snapshot()
    enable(upstream, patch("count", "fakeup.ops:Items.count", plus(100)))
    assert ops.Items([1, 1]).count(1) == 102
    assert [1, 1].count(1) == 2
    apply.disable()
    assert snapshot() == before
    assert ops.Items([1, 1]).count(1) == 2


def test_class_is_replaced(upstream):
    ops = upstream.load("ops")

    def make(original):
        class Louder(original):
            def run(self, x):
                return super().run(x) * 100

        return Louder

    before = snapshot()
    enable(upstream, patch("engine", "fakeup.ops:Engine", make, kind="replace"))
    assert ops.Engine().run(1) == 200
    apply.disable()
    assert snapshot() == before


def test_alias_imported_while_patched_is_followed(upstream):
    """A module loaded after enable() binds the new object; revert and the next enable reach it."""
    declared = patch("scale", SCALE, plus(1), bound_in=("fakeup.user:scale", "fakeup.late:rescale"))
    enable(upstream, declared)
    late, api = upstream.load("late"), upstream.load("api")
    ops = upstream.load("ops")
    assert late.use(3) == api.scale(3) == 7
    apply.disable()
    assert late.rescale is api.scale is ops.scale
    assert late.use(3) == 6
    enable(upstream, declared)
    assert late.use(3) == api.scale(3) == 7
    apply.disable()
    assert late.rescale is api.scale is ops.scale
    assert late.use(3) == 6


def test_undeclared_alias_is_refused(upstream):
    upstream.load("user")
    upstream.load("late")
    before = snapshot()
    with pytest.raises(PatchError) as caught:
        enable(upstream, patch("scale", SCALE, plus(1), bound_in=("fakeup.user:scale",)))
    assert "patch core.scale: fakeup.late:rescale still holds the original" in str(caught.value)
    assert "fakeup.user" not in str(caught.value)
    assert snapshot() == before


def test_undeclared_alias_in_a_class_is_refused(upstream):
    upstream.edit("ops.py", "    level = 3", "    level = 3\n    scaled = scale")
    upstream.load("ops")
    before = snapshot()
    with pytest.raises(PatchError, match=r"fakeup\.ops:Engine\.scaled still holds the original"):
        enable(upstream, patch("scale", SCALE, plus(1)))
    assert snapshot() == before
    ops = upstream.load("ops")
    enable(upstream, patch("scale", SCALE, plus(1), bound_in=("fakeup.ops:Engine.scaled",)))
    assert ops.Engine.scaled(2) == 5


def test_alias_in_the_script_is_refused(upstream):
    program = """
from fakeup.ops import scale
from megatron_resilient.patching import apply
from tests.support.fake_upstream import patch, plus
from megatron_resilient.patching.registry import Registry
from megatron_resilient.patching.lock import Lock
from megatron_resilient.patching.source import SourceTree
registry = Registry((patch("scale", "fakeup.ops:scale", plus(1)),), (), {"fakeup": "fakeup"},
                    ("fakeup",))
apply.enable(["core"], registry=registry, lock=Lock.of_installed(registry, SourceTree()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{upstream.site}"},
    )
    assert "PatchError: patch core.scale: __main__:scale still holds the original" in done.stderr


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("fakeup.user:nothing", "does not exist"),
        ("fakeup.user:use", "is another object, <function use"),
    ],
)
def test_wrong_alias_is_refused(upstream, alias, message):
    upstream.load("user")
    before = snapshot()
    with pytest.raises(PatchError, match=message):
        enable(upstream, patch("scale", SCALE, plus(1), bound_in=(alias,)))
    assert snapshot() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda up: up.edit("ops.py", "x * factor", "x + factor"), r"\+     return x \+ factor"),
        (lambda up: up.edit("ops.py", "def scale(", "def scale_by("), "core.scale .*missing"),
        (lambda up: up.set_version("2.1"), r"fakeup 2\.1 is outside >=1,<2"),
    ],
)
def test_other_upstream_is_refused_before_anything_is_imported(upstream, change, message):
    patches = (patch("run", "fakeup.ops:Engine.run", plus(1)), patch("scale", SCALE, plus(1)))
    registry = upstream.registry(*patches)
    lock = upstream.lock(registry)
    change(upstream)
    nothing = apply.applied_digest()
    with pytest.raises(PatchDriftError, match=message) as caught:
        apply.enable(["core"], registry=registry, lock=lock)
    assert "megatron-resilient patches lock" in str(caught.value)
    assert "fakeup" not in sys.modules
    assert apply.applied_digest() == nothing


def test_unlocked_target_is_refused(upstream):
    registry = upstream.registry(patch("scale", SCALE, plus(1)))
    lock = upstream.lock(upstream.registry())
    with pytest.raises(PatchDriftError, match=r"unlocked: not in patches\.lock"):
        apply.enable(["core"], registry=registry, lock=lock)


def test_drifted_reliance_is_refused(upstream):
    relies = (Reliance("fakeup.ops:Engine", "a test", "fakeup"),)
    registry = upstream.registry(relies=relies)
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "return x + 1", "return x + 3")
    with pytest.raises(PatchDriftError, match=r"fakeup\.ops:Engine: drifted"):
        apply.enable(["core"], registry=registry, lock=lock)
    applied = apply.enable(
        ["core"], registry=registry, lock=lock, allow_drift={"fakeup.ops:Engine"}
    )
    assert applied.allowed_drift == ("fakeup.ops:Engine",)


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize("change", ["code", "version"])
def test_named_drift_is_allowed(upstream, monkeypatch, caplog, by, change):
    registry = upstream.registry(patch("scale", SCALE, plus(1)))
    lock = upstream.lock(registry)
    if change == "code":
        upstream.edit("ops.py", "x * factor", "x + factor")
    else:
        upstream.set_version("3.0")
    if by == "environment":
        monkeypatch.setenv(apply.ALLOW_DRIFT_VARIABLE, "core.scale,")
    applied = apply.enable(
        ["core"],
        registry=registry,
        lock=lock,
        allow_drift={"core.scale"} if by == "argument" else (),
    )
    assert applied.allowed_drift == ("core.scale",)
    assert "drift allowed: core.scale (fakeup.ops:scale): drifted" in caplog.text
    assert upstream.load("ops").scale(5) == (8 if change == "code" else 11)


def test_allowing_drift_of_one_patch_allows_no_other(upstream):
    registry = upstream.registry(
        patch("scale", SCALE, plus(1)), patch("cached", "fakeup.ops:cached", plus(1))
    )
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "x * factor", "x + factor")
    upstream.edit("ops.py", "x + 100", "x + 101")
    with pytest.raises(PatchDriftError) as caught:
        apply.enable(["core"], registry=registry, lock=lock, allow_drift={"core.scale"})
    assert "core.cached" in str(caught.value)
    assert "core.scale" not in str(caught.value)


def test_unknown_name_in_allowed_drift_is_refused(upstream):
    with pytest.raises(PatchError, match=r"core\.scales, which is no patch"):
        enable(upstream, patch("scale", SCALE, plus(1)), allow_drift={"core.scales"})


def test_missing_distribution_is_refused(upstream):
    registry = upstream.registry(patch("scale", SCALE, plus(1)))
    lock = upstream.lock(registry)
    shutil.rmtree(upstream.site / "fakeup-0.dist-info")
    with pytest.raises(PatchError, match="fakeup is not installed") as caught:
        apply.enable(["core"], registry=registry, lock=lock, allow_drift={"core.scale"})
    assert not isinstance(caught.value, PatchDriftError)


def broken(original):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken, r"core\.second: make\(\) failed: RuntimeError\('no'\)"),
        (lambda original: None, r"make\(\) returned None"),
        (lambda original: original, "which replaces nothing"),
        (lambda original: sys.modules["fakeup.ops"].scale_again, "stands elsewhere too"),
    ],
)
def test_failure_in_the_middle_reverts(upstream, make, message):
    upstream.edit("ops.py", "LIMIT = 10", "def scale_again(x): ...")
    upstream.load("ops")
    before = snapshot()
    patches = (
        patch("first", SCALE, plus(1)),
        patch("second", "fakeup.ops:Engine.run", make),
        patch("third", "fakeup.ops:cached", plus(1)),
    )
    with pytest.raises(PatchError, match=message):
        enable(upstream, *patches)
    assert snapshot() == before
    enable(upstream, patches[0], patches[2])  # nothing counts as enabled


def test_import_failure_reverts(upstream):
    (upstream.package / "bad.py").write_text("def f(): ...\nimport nothing_of_this_name\n")
    upstream.load("ops")
    before = snapshot()
    with pytest.raises(PatchError, match=r"fakeup\.bad:f cannot be reached: .*nothing_of_this"):
        enable(upstream, patch("scale", SCALE, plus(1)), patch("bad", "fakeup.bad:f", plus(1)))
    assert snapshot() == before


def test_immutable_owner_is_named(upstream):
    upstream.edit("__init__.py", "", "import datetime\n\nDate = datetime.date\n")
    with pytest.raises(PatchError, match=r"datetime:date\.today cannot be set"):
        enable(upstream, patch("date", "fakeup:Date.today", plus(1)))


def test_one_object_for_two_targets_is_refused(upstream):
    def shared(*args):
        return None

    with pytest.raises(PatchError, match=r"core\.two: make\(\) returned .* stands elsewhere too"):
        enable(
            upstream,
            patch("one", SCALE, lambda original: shared),
            patch("two", "fakeup.ops:cached", lambda original: shared),
        )


def test_replacement_of_our_own_module_stays_there_after_revert(upstream):
    enable(upstream, patch("scale", SCALE, lambda original: broken, kind="replace"))
    assert upstream.load("ops").scale is broken
    apply.disable()
    assert broken.__name__ == "broken"
    assert sys.modules[__name__].broken.__module__ == __name__


def test_chain_applies_in_order_and_reverts_in_reverse(upstream):
    def times(original):
        return lambda x: original(x) * 10

    user = upstream.load("user")
    before = snapshot()
    enable(
        upstream,
        patch("outer", SCALE, times, after=("core.inner",)),
        patch("inner", SCALE, plus(1), bound_in=("fakeup.user:scale",)),
    )
    assert user.use(3) == upstream.load("ops").scale(3) == 70
    late = upstream.load("late")
    assert late.use(3) == 70
    apply.disable()
    assert late.rescale is user.scale
    after = snapshot()
    assert {key: after[key] for key in before} == before


@pytest.mark.parametrize("how", ["replaced", "builtin", "shadowed"])
def test_other_code_in_memory_is_refused(upstream, how, monkeypatch):
    """What runs has to be what was verified; another plugin may have been there first."""
    target = SCALE
    if how == "builtin":
        upstream.edit("__init__.py", "", "from math import sin\n")
        target = "fakeup:sin"
    ops = upstream.load("ops")
    if how == "replaced":
        ops.scale = lambda x: x
    elif how == "builtin":
        sys.modules["fakeup"].sin = lambda x: x
    else:
        ops.__file__ = __file__
    found = snapshot()
    registry = upstream.registry(patch("one", target, plus(1)))
    lock = upstream.lock(registry) if how != "builtin" else builtin_lock(upstream, registry)
    with pytest.raises(PatchError, match=r"core\.one: .* in memory it is .*test_patching_apply"):
        apply.enable(["core"], registry=registry, lock=lock)
    assert snapshot() == found
    apply.enable(["core"], registry=registry, lock=lock, allow_drift={"core.one"})


def builtin_lock(upstream, registry):
    """Locks while the builtin still is one."""
    package = sys.modules["fakeup"]
    ours, package.sin = package.sin, __import__("math").sin
    lock = upstream.lock(registry)
    package.sin = ours
    return lock


def test_enable_is_idempotent_and_knows_one_set(upstream):
    patches = (patch("scale", SCALE, plus(1)),)
    first = enable(upstream, *patches)
    assert enable(upstream, *patches) is first
    assert upstream.load("ops").scale(1) == 3
    with pytest.raises(PatchError, match="groups core are enabled"):
        apply.enable(["core", "fixes"], registry=upstream.registry(*patches))
    apply.disable()
    apply.disable()
    assert upstream.load("ops").scale(1) == 2


def test_unknown_group_is_refused():
    with pytest.raises(PatchError, match="unknown patch group 'gpu'"):
        apply.enable(["gpu"])


def test_context_manager(upstream):
    registry = upstream.registry(patch("scale", SCALE, plus(1)))
    options = {"registry": registry, "lock": upstream.lock(registry)}
    ops = upstream.load("ops")

    def fail():
        with apply.patched(["core"], **options) as applied:
            assert applied.ids == ("core.scale",)
            with apply.patched(["core"], **options):
                pass
            assert ops.scale(1) == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ops.scale(1) == 2


def test_only_chosen_groups_are_verified_and_applied(upstream):
    registry = upstream.registry(
        patch("scale", SCALE, plus(1)),
        patch("run", "fakeup.ops:Engine.run", plus(1), group="fixes"),
    )
    lock = upstream.lock(registry)
    upstream.edit("ops.py", "x * factor", "x + factor")
    assert apply.enable(["fixes"], registry=registry, lock=lock).ids == ("fixes.run",)


def test_digest_tells_sets_and_upstreams_apart(upstream):
    one, two = patch("one", SCALE, plus(1)), patch("two", "fakeup.ops:Engine.run", plus(1))

    def digest(*patches):
        upstream.unload()
        enable(upstream, *patches)
        found = apply.applied_digest()
        apply.disable()
        return found

    nothing = apply.applied_digest()
    both = digest(one, two)
    assert both == digest(two, one)
    assert len({nothing, both, digest(one), digest(two)}) == 4
    upstream.edit("ops.py", "# a comment", "# another")
    assert digest(one, two) == both
    upstream.edit("ops.py", "x * factor", "x + factor")
    assert digest(one, two) != both


@settings(deadline=None)
@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=9))
def test_ranks_compare_digests(digests):
    if len(set(digests)) == 1:
        apply.check_same_digest(digests)
        return
    fewer = min("ab", key=lambda each: (digests.count(each), -digests.index(each)))
    ranks = ", ".join(str(rank) for rank, each in enumerate(digests) if each == fewer)
    with pytest.raises(PatchError) as caught:
        apply.check_same_digest(digests)
    assert f"ranks {ranks}: {fewer};" in str(caught.value)
