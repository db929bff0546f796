"""Finds the source of upstream names by reading files; no upstream package is imported.

`importlib.util.find_spec` imports the parents of a nested module, that is all of torch. The finders
behind it import nothing: `SourceTree` asks those one part of the name at a time.
"""

import ast
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import get_importer
from typing import cast

from megatron_resilient.errors import PatchError
from megatron_resilient.patching.target import Target

# Statements whose bodies run in the scope that they stand in.
_Block = ast.If | ast.Try | ast.TryStar | ast.With | ast.For | ast.While


@dataclass(frozen=True)
class Module:
    """One parsed source file.

    Attributes:
        name: dotted name.
        file: where it is.
        is_package: whether it is an `__init__.py`.
        lines: its text, line ends kept.
        body: its statements.
    """

    name: str
    file: Path
    is_package: bool
    lines: tuple[str, ...]
    body: tuple[ast.stmt, ...]

    @property
    def relative_file(self) -> str:
        """The path below the directory from which it is imported, with forward slashes."""
        stem = self.name.replace(".", "/")
        return f"{stem}/__init__.py" if self.is_package else f"{stem}.py"

    def absolute_name(self, statement: ast.ImportFrom) -> str:
        """The module from which a `from ... import` of this file imports."""
        if not statement.level:
            return statement.module or ""
        package = self.name.split(".")
        package = package[: len(package) - statement.level + self.is_package]
        return ".".join([*package, *([statement.module] if statement.module else [])])


@dataclass(frozen=True)
class Definition:
    """The statements that give a name its value, in one scope of one file.

    There are several when a function has overloads, a property a setter, or a fallback stands in
    an `except` branch: each of them counts.
    """

    module: Module
    path: tuple[str, ...]
    statements: tuple[ast.stmt, ...]

    @property
    def target(self) -> Target:
        """Its address, behind all re-exports."""
        return Target(self.module.name, self.path)

    @property
    def first_line(self) -> int:
        """The line on which it starts, decorators included, from 1."""
        return first_line(self.statements[0])

    @property
    def plain_function(self) -> bool:
        """Whether calling the name surely runs the code of an undecorated `def` written here."""
        return (
            all(
                isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in self.statements
            )
            and not cast(ast.FunctionDef, self.statements[-1]).decorator_list
        )


class SourceTree:
    """Upstream source as one search path sees it. Files are read once and kept.

    Args:
        path: directories to search; None is the running interpreter's own way of importing.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._specs: dict[str, ModuleSpec | None] = {}
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Returns the parsed source of a module; None if it has none or does not exist."""
        if name not in self._modules:
            spec = self._spec(name)
            origin = spec.origin if spec is not None and spec.has_location else None
            self._modules[name] = (
                parse(name, Path(origin)) if origin and origin.endswith(".py") else None
            )
        return self._modules[name]

    def files(self, package: str) -> Iterator[tuple[str, Path]]:
        """Yields (module name, file) of every source file below a package, sorted by name."""
        found: dict[str, Path] = {}
        for location in self._search_locations(package) or ():
            root = Path(location)
            for file in root.rglob("*.py"):
                parts = file.relative_to(root).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found.setdefault(".".join((package, *parts)), file)
        yield from sorted(found.items())

    def definition(self, target: Target) -> Definition | None:
        """Finds where a name is defined, through re-imports (`from x import y`, also `*`).

        Returns:
            None for what has no Python source of its own: a C builtin, a module, a name set at run
            time, an inherited method, or no such thing at all.
        """
        found = self._in_module(target.module, target.path[0], frozenset())
        for name in target.path[1:]:
            if found is None:
                return None
            body = [
                statement
                for each in found.statements
                if isinstance(each, ast.ClassDef)
                for statement in each.body
            ]
            statements = tuple(bindings(body, name))
            path = (*found.path, name)
            found = Definition(found.module, path, statements) if statements else None
        return found

    def _in_module(
        self, module_name: str, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        module = self.module(module_name)
        if module is None or (module_name, name) in seen:
            return None
        seen |= {(module_name, name)}
        statements = tuple(bindings(module.body, name))
        if not statements:
            return self._through_star(module, name, seen)
        only = statements[0]
        if len(statements) > 1 or not isinstance(only, ast.Import | ast.ImportFrom):
            return Definition(module, (name,), statements)
        if isinstance(only, ast.ImportFrom):
            source = module.absolute_name(only)
            original = next(a.name for a in only.names if (a.asname or a.name) == name)
            return self._in_module(source, original, seen)
        return None

    def _through_star(
        self, module: Module, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        if name.startswith("_"):
            return None
        for statement in bindings(module.body, "*"):
            if isinstance(statement, ast.ImportFrom):
                found = self._in_module(module.absolute_name(statement), name, seen)
                if found is not None:
                    return found
        return None

    def _search_locations(self, package: str) -> list[str] | None:
        spec = self._spec(package)
        return None if spec is None else spec.submodule_search_locations

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._specs:
            self._specs[name] = self._find_spec(name)
        return self._specs[name]

    def _find_spec(self, name: str) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        places = self._search_locations(parent) if parent else self._path
        portions: list[str] = []
        for place in (sys.path if places is None and not parent else places) or ():
            finder = get_importer(place)
            spec = finder.find_spec(name) if finder is not None else None
            if spec is not None and spec.loader is not None:
                return spec
            if spec is not None:
                portions += spec.submodule_search_locations or ()
        if portions:
            namespace = ModuleSpec(name, None, is_package=True)
            namespace.submodule_search_locations = portions
            return namespace
        if self._path is None:
            # Editable installs. PathFinder itself was asked above; its namespace packages want
            # their parents imported.
            for meta_finder in sys.meta_path:
                if meta_finder is not PathFinder:
                    spec = meta_finder.find_spec(name, places)
                    if spec is not None:
                        return spec
        return None


def parse(name: str, file: Path) -> Module:
    """Reads and parses one source file.

    Raises:
        PatchError: it is not Python that this interpreter understands.
    """
    text = file.read_text(encoding="utf-8")
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise PatchError(f"{file} line {error.lineno}: {error.msg}") from error
    # Not str.splitlines, which also splits at form feeds and the like; the parser does not.
    lines = tuple(io.StringIO(text))
    return Module(name, file, file.name == "__init__.py", lines, tuple(body))


def first_line(statement: ast.stmt) -> int:
    """The line on which a statement starts, its decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def scope(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of one scope, those in its `if`, `try` and other blocks included."""
    for statement in body:
        yield statement
        if isinstance(statement, _Block):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, ()):
                    yield from scope(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def bindings(body: Iterable[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Yields the statements of a scope that bind `name` (`*`: the star imports)."""
    for statement in scope(body):
        if name in _bound_names(statement):
            yield statement


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import():
            yield from (a.asname or a.name.partition(".")[0] for a in statement.names)
        case ast.ImportFrom():
            yield from (a.asname or a.name for a in statement.names)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from _names(targets)


def _names(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        match target:
            case ast.Name():
                yield target.id
            case ast.Tuple() | ast.List():
                yield from _names(target.elts)
