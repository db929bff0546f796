"""Declarations that cannot work are refused when the registry is made."""

import re
from types import ModuleType

import pytest

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.registry import Patch, Registry, Reliance, collect
from megatron_resilient.patching.target import Target
from tests.support.fake_upstream import patch, plus

SCALE = "fakeup.ops:scale"


def registry(*patches: Patch, relies: tuple[Reliance, ...] = ()) -> Registry:
    return Registry(patches, relies, upstreams={"base": "base", "fakeup": "fakeup"})


def test_target_is_read_and_written():
    target = Target.parse("a.b:C.d")
    assert (target.module, target.path, target.root) == ("a.b", ("C", "d"), "a")
    assert str(target) == "a.b:C.d"


@pytest.mark.parametrize("text", ["a.b", "a.b:", ":c", "a..b:c", "a.b:c.", "a b:c", "a:b:c", ""])
def test_malformed_target_is_refused(text):
    with pytest.raises(PatchError, match="malformed target"):
        registry(patch("one", text, plus(1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "other"}, "unknown group 'other'"),
        ({"id": "cpu.one"}, "must read core.what-it-does"),
        ({"id": "core.One_two"}, "must read core.what-it-does"),
        ({"kind": "delete"}, "kind is wrap or replace"),
        ({"reason": " "}, "`reason` is empty"),
        ({"no_seam": ""}, "`no_seam` is empty"),
        ({"removable_when": ""}, "`removable_when` is empty"),
        ({"versions": "newest"}, "'newest' is no specifier"),
        ({"versions": ""}, "`versions` is empty"),
        ({"upstream": "nobody"}, "unknown upstream 'nobody'"),
        ({"upstream": "base"}, "is not part of base"),
        ({"bound_in": ("fakeup.user.scale",)}, "malformed target"),
        ({"after": ("core.none",)}, "unknown patch core.none"),
    ],
)
def test_bad_declaration_is_refused(changes, message):
    with pytest.raises(PatchError, match=re.escape(message)):
        registry(patch("one", SCALE, plus(1), **changes))


def test_duplicate_id_is_refused():
    with pytest.raises(PatchError, match=r"core\.one is declared 2 times"):
        registry(patch("one", SCALE, plus(1)), patch("one", "fakeup.ops:cached", plus(1)))


def test_two_patches_on_one_target_need_an_order():
    one, two = patch("one", SCALE, plus(1)), patch("two", SCALE, plus(2))
    with pytest.raises(PatchError, match=r"core\.one and core\.two both target"):
        registry(one, two)


def test_every_pair_on_a_target_needs_an_order():
    patches = (
        patch("one", SCALE, plus(1)),
        patch("two", SCALE, plus(2), after=("core.one",)),
        patch("three", SCALE, plus(3), after=("core.one",)),
    )
    with pytest.raises(PatchError, match=r"core\.two and core\.three both target"):
        registry(*patches)


def test_order_goes_through_intermediates():
    third = patch("a", SCALE, plus(3), after=("core.b",))
    second = patch("b", SCALE, plus(2), after=("core.c",))
    first = patch("c", SCALE, plus(1))
    assert [p.id for p in registry(third, second, first).in_order(["core"])] == [
        "core.c",
        "core.b",
        "core.a",
    ]


def test_circle_is_refused():
    with pytest.raises(PatchError, match="in a circle"):
        registry(
            patch("one", SCALE, plus(1), after=("core.two",)),
            patch("two", SCALE, plus(2), after=("core.one",)),
        )


def test_order_between_targets_is_refused():
    with pytest.raises(PatchError, match="has another target"):
        registry(
            patch("one", SCALE, plus(1)),
            patch("two", "fakeup.ops:cached", plus(2), after=("core.one",)),
        )


def test_order_against_the_groups_is_refused():
    with pytest.raises(PatchError, match="group core is applied after group cpu"):
        registry(
            patch("one", SCALE, plus(1)),
            patch("two", SCALE, plus(2), group="cpu", after=("core.one",)),
        )


def test_one_name_under_two_targets_is_refused():
    with pytest.raises(PatchError, match=r"both bind fakeup\.user:scale"):
        registry(
            patch("one", SCALE, plus(1), bound_in=("fakeup.user:scale",)),
            patch("two", "fakeup.user:scale", plus(2)),
        )


def test_groups_and_upstreams_are_ordered():
    patches = (
        patch("late", "fakeup.ops:a", plus(1)),
        patch("fix", "fakeup.ops:b", plus(1), group="fixes"),
        patch("far", "fakeup.ops:c", plus(1), group="cpu"),
        patch("near", "base.ops:d", plus(1), group="cpu", upstream="base"),
    )
    whole = registry(*patches)
    assert [p.id for p in whole.in_order(["core", "fixes", "cpu"])] == [
        "cpu.near",
        "cpu.far",
        "fixes.fix",
        "core.late",
    ]
    assert [p.id for p in whole.in_order(["fixes"])] == ["fixes.fix"]


def test_an_order_needs_only_what_is_enabled():
    first = patch("one", SCALE, plus(1), group="cpu")
    second = patch("two", SCALE, plus(2), after=("cpu.one",))
    assert [p.id for p in registry(first, second).in_order(["core"])] == ["core.two"]


def test_reliance_is_checked():
    with pytest.raises(PatchError, match="unknown upstream 'megatron-core'"):
        registry(relies=(Reliance(SCALE, "a test"),))


def test_module_without_patches_is_refused():
    with pytest.raises(PatchError, match="helper declares no PATCHES"):
        Registry.from_modules([ModuleType("helper")])


def test_package_is_collected(tmp_path, monkeypatch):
    package = tmp_path / "some_patches"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("_helper.py").write_text("raise RuntimeError('not a patch module')\n")
    package.joinpath("b.py").write_text("PATCHES = ()\n")
    package.joinpath("a.py").write_text(
        "from megatron_resilient.patching.registry import Reliance\n"
        "PATCHES = ()\n"
        "RELIES_ON = (Reliance('megatron.core:x', 'a test'),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    collected = collect("some_patches")
    assert collected.targets == {"megatron.core:x": "megatron-core"}
