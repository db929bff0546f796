"""A fingerprint changes with the code and with nothing else."""

import ast
import heapq
import inspect
import io
import keyword
import string
import textwrap
import tokenize
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_resilient.patching.fingerprint import Fingerprint, fingerprint
from megatron_resilient.patching.source import Definition, Module


def of(text: str, name: str | None = None) -> Fingerprint:
    """Fingerprint of all statements of a text, or of those that define `name`."""
    body = ast.parse(text).body
    chosen = [each for each in body if name is None or getattr(each, "name", None) == name]
    module = Module("m", Path("m.py"), False, tuple(io.StringIO(text)), tuple(body))
    return fingerprint(Definition(module, ("x",), tuple(chosen)))


def real_code() -> list[str]:
    """Source of functions and classes of the standard library that have no f-strings."""
    found = []
    for module in (textwrap, heapq, keyword, string, inspect):
        text = inspect.getsource(module)
        for statement in ast.parse(text).body:
            segment = ast.get_source_segment(text, statement)
            is_code = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            if (
                is_code
                and len(segment) < 3000
                and not any(isinstance(n, ast.JoinedStr) for n in ast.walk(statement))
            ):
                found.append(segment + "\n")
    return found


CODE = real_code()


def test_there_is_real_code():
    assert len(CODE) > 100


@settings(deadline=None)
@given(st.sampled_from(CODE), st.data())
def test_layout_and_comments_do_not_matter(code, data):
    """Every gap between tokens is drawn anew; inside brackets also line breaks."""
    gap = st.integers(1, 3).map(" ".__mul__)
    noise = st.sampled_from(["", "", "  # why", "\n\n", "\n        # odd place\n"])
    rows, row, depth, nesting = [], "", 0, 0
    for each in tokenize.generate_tokens(io.StringIO(code).readline):
        if each.type == tokenize.INDENT:
            depth += 1
        elif each.type == tokenize.DEDENT:
            depth -= 1
        elif each.type == tokenize.NEWLINE:
            rows.append(row + data.draw(noise))
            row = ""
        elif each.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            row = row or "   " * depth
            nesting += (each.string in "([{") - (each.string in ")]}") if each.string else 0
            broken = nesting > 0 and data.draw(st.booleans())
            row += each.string + ("  # here\n" if broken else data.draw(gap))
    again = of("\n".join(rows) + "\n")
    assert again.tokens == of(code).tokens
    assert again.signature == of(code).signature
    assert [line.hash for line in again.lines] == [line.hash for line in of(code).lines]


@settings(deadline=None)
@given(st.sampled_from(CODE), st.data())
def test_every_token_matters(code, data):
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    candidates = [
        each
        for each in tokens
        if (each.type == tokenize.NAME and not keyword.iskeyword(each.string))
        or each.type == tokenize.NUMBER
    ]
    assume(candidates)
    chosen = data.draw(st.sampled_from(candidates))
    changed = f"{chosen.string}_" if chosen.type == tokenize.NAME else f"({chosen.string}+1)"
    lines = code.splitlines(keepends=True)
    row, column = chosen.start
    text = lines[row - 1]
    lines[row - 1] = text[:column] + changed + text[chosen.end[1] :]
    mutated = "".join(lines)
    try:
        ast.parse(mutated)
    except SyntaxError:  # `case` renamed, and the like
        assume(False)
    assert of(mutated).tokens != of(code).tokens


BASE = "def f(a, b=1):\n    if a:\n        a += 1\n    return a\n"


@pytest.mark.parametrize(
    "same",
    [
        'def f(a, b=1):\n    """Doc."""\n    if a:\n        a += 1\n    return a\n',
        'def f(a, b=1):\n    """Doc.\n\n  More."""\n    if a:\n        a += 1\n    return a\n',
        "def f(\n  a,\n  b = 1\n):\n  if a: # c\n\n      a += 1\n  # d\n  return a\n",
    ],
)
def test_same_code(same):
    assert of(same).tokens == of(BASE).tokens
    assert of(same).signature == of(BASE).signature


@pytest.mark.parametrize(
    ("other", "signature_too"),
    [
        ("def f(a, b=1):\n    if a:\n        a += 2\n    return a\n", False),
        ("def f(a, b=1):\n    if a:\n        a += 1\n        return a\n", False),
        ("@g\n" + BASE, False),
        ("def f(a: int, b=1):\n    if a:\n        a += 1\n    return a\n", False),
        ("def f(a, b=2):\n    if a:\n        a += 1\n    return a\n", True),
        ("def f(a, c=1):\n    if a:\n        a += 1\n    return a\n", True),
        ("def f(a, *, b=1):\n    if a:\n        a += 1\n    return a\n", True),
        ("def f(a, b=1, **c):\n    if a:\n        a += 1\n    return a\n", True),
        ("def f(a, /, b=1):\n    if a:\n        a += 1\n    return a\n", True),
        ("async " + BASE, True),
    ],
)
def test_other_code(other, signature_too):
    assert of(other).tokens != of(BASE).tokens
    assert (of(other).signature != of(BASE).signature) == signature_too


def test_signature_of_a_class_is_its_bases_and_init():
    text = (
        "class C(A):\n    def __init__(self, x):\n        pass\n    def m(self, y):\n        pass\n"
    )
    assert of(text.replace("(self, y)", "(self)")).signature == of(text).signature
    assert of(text.replace("(self, x)", "(self)")).signature != of(text).signature
    assert of(text.replace("(A)", "(B)")).signature != of(text).signature
    assert of(text.replace("(self, y)", "(self)")).tokens != of(text).tokens


def test_strings_that_are_used_matter():
    assert of("def f():\n    return 'a'\n").tokens != of("def f():\n    return 'b'\n").tokens
    assert of("def f():\n    g('a')\n").tokens != of("def f():\n    g('b')\n").tokens


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("f'{a}'", "f'{b}'"),
        ("f'x{{}}{a}'", "f'x{{{a}}}'"),
        ("f'{a!r}'", "f'{a!s}'"),
        ("f'{a:>{n}}'", "f'{a:>{m}}'"),
        ("f'''{a}\n'''", "f'''{a}\n\n'''"),
        ("f'{f\"{a}\"}'", "f'{f\"{b}\"}'"),
    ],
)
def test_fstrings(one, two):
    first, second = f"def f():\n    return {one}\n", f"def f():\n    return {two}\n"
    assert of(first).tokens != of(second).tokens
    assert of(first + "# c\n").tokens == of(first).tokens


def test_lines_know_where_they_stand():
    text = "x = 1\n@g\ndef f(\n    a,\n):\n    # c\n    return [\n        a\n    ]\n"
    lines = of(text, "f").lines
    assert [(line.first, line.last, line.depth) for line in lines] == [
        (2, 2, 0),
        (3, 5, 0),
        (7, 9, 1),
    ]


def test_methods_are_like_functions():
    body = ast.parse(f"class C:\n{textwrap.indent(BASE, '    ')}").body[0].body
    text = f"class C:\n{textwrap.indent(BASE, '    ')}"
    module = Module("m", Path("m.py"), False, tuple(io.StringIO(text)), ())
    method = fingerprint(Definition(module, ("C", "f"), tuple(body)))
    assert method.tokens == of(BASE).tokens
    assert [line.first for line in method.lines] == [2, 3, 4, 5]
