"""Finds, by reading files, where `from ... import` binds a patched object under another name."""

import ast
from collections.abc import Collection, Iterator

from megatron_resilient.patching.registry import GROUPS, Patch, Registry
from megatron_resilient.patching.source import SourceTree, scope
from megatron_resilient.patching.target import Target


def alias_problems(
    registry: Registry, tree: SourceTree, groups: Collection[str] = GROUPS
) -> tuple[str, ...]:
    """Checks `bound_in` of the patches of `groups` against the module-level imports of upstream.

    A module that imports a patched name keeps the original object unless that is declared. Searched
    are the registry's `alias_roots`; inside torch, what is not declared is meant to stay. What is
    bound in other ways is found at run time, when patches are applied.

    Returns:
        One line per undeclared alias and per declared one that is none.
    """
    patches = [patch for patch in registry.patches if patch.group in groups]
    wrong = [problem for patch in patches for problem in _wrong(patch, tree)]
    return (*wrong, *_undeclared(patches, registry.alias_roots, tree))


def _wrong(patch: Patch, tree: SourceTree) -> Iterator[str]:
    home = tree.definition(Target.parse(patch.target))
    if home is None:  # a builtin: nothing to compare with
        return
    for name in patch.bound_in:
        alias = tree.definition(Target.parse(name))
        if alias is None:
            yield f"{patch.id}: bound_in names {name}, which does not exist"
        elif alias.target != home.target and not any(
            isinstance(each, ast.Assign | ast.AnnAssign) for each in alias.statements
        ):
            yield f"{patch.id}: bound_in names {name}, which is {alias.target}, not {home.target}"


def _undeclared(
    patches: Collection[Patch], roots: Collection[str], tree: SourceTree
) -> Iterator[str]:
    owners: dict[Target, list[Patch]] = {}
    declared: set[str] = set()
    for patch in patches:
        target = Target.parse(patch.target)
        if patch.group == "cpu" and target.root not in roots:
            continue  # applied before any of these packages is imported
        declared |= {patch.target, *patch.bound_in}
        home = tree.definition(target)
        if home is not None and len(home.path) == 1:
            owners.setdefault(home.target, []).append(patch)
    for alias, home_target in _aliases(roots, owners.keys(), tree):
        if str(alias) not in declared:
            ids = ", ".join(patch.id for patch in owners[home_target])
            yield f"{ids}: {alias} holds what {home_target} defines; add it to bound_in"


def _aliases(
    roots: Collection[str], homes: Collection[Target], tree: SourceTree
) -> Iterator[tuple[Target, Target]]:
    """Yields (name, home) for each home and each module-level import of one, below `roots`."""
    yield from ((home, home) for home in homes if home.root in roots)
    texts = {
        name: file.read_text(encoding="utf-8") for root in roots for name, file in tree.files(root)
    }
    known: set[Target] = set()
    wanted = {home.path[0] for home in homes}
    while wanted:
        renamed: set[str] = set()
        for name, text in texts.items():
            # Parsing is slow, and most files mention none of the names.
            if not any(each in text for each in wanted):
                continue
            for alias, home in _imports(name, wanted, tree):
                if home in homes and alias not in known:
                    known.add(alias)
                    renamed.add(alias.path[0])
                    yield alias, home
        wanted = renamed - wanted


def _imports(
    module_name: str, wanted: Collection[str], tree: SourceTree
) -> Iterator[tuple[Target, Target]]:
    module = tree.module(module_name)
    for statement in scope(module.body if module is not None else ()):
        if module is None or not isinstance(statement, ast.ImportFrom):
            continue
        for each in statement.names:
            if each.name in wanted:
                source = Target(module.absolute_name(statement), (each.name,))
                definition = tree.definition(source)
                if definition is not None:
                    yield Target(module_name, (each.asname or each.name,)), definition.target
