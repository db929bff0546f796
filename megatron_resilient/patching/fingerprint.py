"""Fingerprints of upstream code: they change with the code, not with its comments or layout."""

import ast
import hashlib
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from token import DEDENT, INDENT, NEWLINE, STRING

from megatron_resilient.patching.source import Definition, first_line

_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER, tokenize.TYPE_COMMENT}
# f-strings, and from Python 3.14 t-strings.
_TEMPLATE_STARTS = {getattr(tokenize, f"{letter}STRING_START", None) for letter in "FT"}
_TEMPLATE_ENDS = {getattr(tokenize, f"{letter}STRING_END", None) for letter in "FT"}


@dataclass(frozen=True)
class LogicalLine:
    """One logical line of code.

    Attributes:
        first: its first physical line in the file, from 1.
        last: its last physical line.
        depth: levels of indentation below the statement that it is part of.
        tokens: its tokens, comments and line breaks left out.
    """

    first: int
    last: int
    depth: int
    tokens: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Eight hex digits: enough to align two versions of a function, not to prove equality."""
        return _digest(self._text())[:8]

    def _text(self) -> str:
        return "\x1f".join((str(self.depth), *self.tokens))


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a definition's code.

    Attributes:
        signature: hash of parameter names, kinds and defaults (of a class: bases and `__init__`).
        tokens: hash of all tokens without comments, docstrings, blank space.
        lines: the logical lines that `tokens` is made of.
    """

    signature: str
    tokens: str
    lines: tuple[LogicalLine, ...]


def fingerprint(definition: Definition) -> Fingerprint:
    """Computes the fingerprint of a definition, in time linear in its length."""
    lines = tuple(
        line
        for statement in definition.statements
        for line in logical_lines(definition.module.lines, statement)
    )
    return Fingerprint(
        signature=_digest("\n".join(_signature(each) for each in definition.statements)),
        tokens=_digest("\n".join(line._text() for line in lines)),
        lines=lines,
    )


def logical_lines(file_lines: Sequence[str], statement: ast.stmt) -> Iterator[LogicalLine]:
    """Yields the logical lines of one statement, without those that are only a string.

    A line that is only a string does nothing, except be a docstring.
    """
    start = first_line(statement)
    segment = file_lines[start - 1 : statement.end_lineno]
    depth = -_is_indented(segment)
    rows: list[int] = []
    texts: list[str] = []
    only_strings = True
    for kind, text, first_row, last_row in _tokens(segment):
        if kind == INDENT:
            depth += 1
        elif kind == DEDENT:
            depth -= 1
        elif kind != NEWLINE:
            rows += (first_row, last_row)
            texts.append(text)
            only_strings &= kind == STRING
        elif texts:
            if not only_strings:
                yield LogicalLine(start - 1 + min(rows), start - 1 + max(rows), depth, tuple(texts))
            rows, texts, only_strings = [], [], True


def _is_indented(segment: Sequence[str]) -> bool:
    return segment[0][:1].isspace()


def _tokens(segment: Sequence[str]) -> Iterator[tuple[int, str, int, int]]:
    """Yields (kind, text, first row, last row), a template string as one token.

    How the inside of an f-string is cut into tokens has changed between Python releases; its text
    has not.
    """
    nesting = 0
    start = (0, 0)
    for token in tokenize.generate_tokens(iter(segment).__next__):
        if token.type in _TEMPLATE_STARTS:
            start = start if nesting else token.start
            nesting += 1
        elif token.type in _TEMPLATE_ENDS:
            nesting -= 1
            if not nesting:
                yield tokenize.OP, _slice(segment, start, token.end), start[0], token.end[0]
        elif not nesting and token.type not in _SKIPPED:
            yield token.type, token.string, token.start[0], token.end[0]


def _slice(segment: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    rows = list(segment[start[0] - 1 : end[0]])
    rows[-1] = rows[-1][: end[1]]
    rows[0] = rows[0][start[1] :]
    return "".join(rows)


def _signature(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
            return f"{type(statement).__name__} {name}({_parameters(args)})"
        case ast.ClassDef():
            init = [
                _signature(each)
                for each in statement.body
                if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            ]
            bases = [ast.unparse(each) for each in (*statement.bases, *statement.keywords)]
            return f"class {statement.name}({', '.join(bases)}) {' '.join(init)}"
    return type(statement).__name__


def _parameters(args: ast.arguments) -> str:
    """Names, kinds and defaults. Annotations are left out: no caller can break on them."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg or args.kwonlyargs:
        parts.append(f"*{args.vararg.arg if args.vararg else ''}")
    parts += [_parameter(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    return ", ".join(parts)


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    return parameter.arg if default is None else f"{parameter.arg}={ast.unparse(default)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
