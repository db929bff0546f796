"""docs/api.md names what is public, all of it and nothing else, as it is."""

import inspect
import re

import megatron_resilient
from tests.unit.test_readme import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_stands_there_with_its_parameters():
    named = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE, re.MULTILINE))
    assert sorted(named) == sorted(megatron_resilient.__all__)
    for name, parameters in named.items():
        signature = inspect.signature(getattr(megatron_resilient, name)).parameters.values()
        given = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in signature]
        assert parameters.split(", ") == (given or [""]), name
        assert inspect.getdoc(getattr(megatron_resilient, name)), name


def test_nothing_else_is_bound_by_importing_it():
    bound = {name for name in vars(megatron_resilient) if not name.startswith("_")}
    modules = {name for name in bound if inspect.ismodule(vars(megatron_resilient)[name])}
    assert bound - modules <= {*megatron_resilient.__all__, "Any"}
