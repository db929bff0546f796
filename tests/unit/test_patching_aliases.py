"""`patches check` finds undeclared and wrong aliases by reading files."""

import pytest

from megatron_resilient.patching.aliases import alias_problems
from megatron_resilient.patching.registry import Patch, Registry
from megatron_resilient.patching.source import SourceTree
from tests.support.fake_upstream import FakeUpstream, patch, plus

SCALE = "fakeup.ops:scale"
ALL = ("fakeup.api:scale", "fakeup.late:rescale", "fakeup.user:scale")


@pytest.fixture
def upstream(tmp_path):
    return FakeUpstream(tmp_path / "site")


def problems(upstream: FakeUpstream, *patches: Patch, roots: tuple[str, ...] = ("fakeup",)):
    registry = Registry(patches, (), {"fakeup": "fakeup"}, roots)
    return alias_problems(registry, SourceTree([str(upstream.site)]))


def test_undeclared_imports_are_found(upstream):
    found = problems(upstream, patch("scale", SCALE, plus(1)))
    assert found == (
        "core.scale: fakeup.late:rescale holds what fakeup.ops:scale defines; add it to bound_in",
        "core.scale: fakeup.user:scale holds what fakeup.ops:scale defines; add it to bound_in",
    )


def test_declared_imports_are_fine(upstream):
    assert problems(upstream, patch("scale", SCALE, plus(1), bound_in=ALL)) == ()


def test_reexports_are_followed_under_new_names(upstream):
    (upstream.package / "again.py").write_text("from .late import rescale as twice\n")
    (upstream.package / "last.py").write_text(
        "if True:\n    from fakeup.again import twice\n\n\ndef f():\n    from .ops import scale\n"
    )
    found = problems(upstream, patch("scale", SCALE, plus(1), bound_in=ALL))
    assert [each.split()[1] for each in found] == ["fakeup.again:twice", "fakeup.last:twice"]


def test_target_that_is_a_reexport_itself(upstream):
    declared = patch("scale", "fakeup.late:rescale", plus(1), bound_in=(SCALE, "fakeup.user:scale"))
    assert problems(upstream, declared) == ()
    found = problems(upstream, patch("scale", "fakeup.late:rescale", plus(1)))
    assert [each.split()[1] for each in found] == [SCALE, "fakeup.user:scale"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fakeup.user:nothing", "fakeup.user:nothing, which does not exist"),
        ("fakeup.nothing:scale", "fakeup.nothing:scale, which does not exist"),
        ("fakeup.user:use", "fakeup.user:use, which is fakeup.user:use, not fakeup.ops:scale"),
    ],
)
def test_wrong_declarations_are_found(upstream, name, message):
    found = problems(upstream, patch("scale", SCALE, plus(1), bound_in=(*ALL, name)))
    assert found == (f"core.scale: bound_in names {message}",)


def test_an_assignment_may_be_an_alias(upstream):
    upstream.edit("user.py", "\n\n\ndef", "\n\nscaled = scale\n\n\ndef")
    declared = patch("scale", SCALE, plus(1), bound_in=(*ALL, "fakeup.user:scaled"))
    assert problems(upstream, declared) == ()


def test_what_is_patched_before_the_roots_are_imported_needs_nothing(upstream):
    declared = patch("scale", SCALE, plus(1), group="cpu")
    assert problems(upstream, declared, roots=("other",)) == ()
    assert len(problems(upstream, declared)) == 2


def test_methods_have_no_aliases(upstream):
    assert problems(upstream, patch("run", "fakeup.ops:Engine.run", plus(1))) == ()
