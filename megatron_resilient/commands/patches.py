"""Lists the patches of upstream code, and checks that upstream still is what they were made for."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_resilient.patching.verify import Finding

HELP = "list, check, diff, lock or document the patches of upstream code"

COLUMNS = ("id", "target", "kind", "range", "state")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=text, description=text, allow_abbrev=False)

    for name, text in (
        ("list", "show every patch, what it targets and whether it still fits"),
        ("check", "compare upstream with patches.lock; imports neither torch nor Megatron"),
    ):
        action = add(name, text)
        action.add_argument(
            "--groups",
            metavar="LIST",
            help="only patches of these groups, separated by commas (default: all); reliances are "
            "always looked at",
        )
        action.add_argument("--json", action="store_true", help="print one JSON document")
    diff = add("diff", "show how upstream code differs from what was locked")
    diff.add_argument(
        "name", nargs="?", metavar="ID", help="a patch, or the target of a reliance; default: all"
    )
    diff.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="a directory with the locked version unpacked, to show removed text too",
    )
    add("lock", "write patches.lock from the upstream code that is installed")
    docs = add("docs", "write the page that documents every patch")
    docs.add_argument("--output", type=Path, default=Path("docs/patches.md"), metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Returns 1 when upstream drifted, else 0."""
    actions = {"list": _list, "check": _check, "diff": _diff, "lock": _lock, "docs": _docs}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    findings, _ = _examine(args.groups)
    if args.json:
        print(json.dumps(_listing(findings), indent=2))
    else:
        _show(findings)
    return 0


def _check(args: argparse.Namespace) -> int:
    from megatron_resilient.patching.report import diff, has_diff, summary

    findings, problems = _examine(args.groups, problems=True)
    bad = [finding for finding in findings if finding.state != "ok"]
    ok = not bad and not problems
    if args.json:
        document = {
            "ok": ok,
            "upstreams": _versions(findings),
            "findings": [
                _state(finding) | {"diff": diff(finding) if has_diff(finding) else None}
                for finding in findings
            ],
            "problems": problems,
        }
        print(json.dumps(document, indent=2))
        return 0 if ok else 1
    for finding in bad:
        print(summary(finding))
        if has_diff(finding):
            print(diff(finding), end="")
    for problem in problems:
        print(problem)
    upstreams = ", ".join(f"{name} {version}" for name, version in _versions(findings).items())
    verdict = "ok" if ok else f"{len(bad)} not as locked, {len(problems)} other problems"
    print(f"{len(findings)} patches and reliances on {upstreams}: {verdict}")
    return 0 if ok else 1


def _diff(args: argparse.Namespace) -> int:
    from megatron_resilient.errors import PatchError
    from megatron_resilient.patching.report import diff, full_diff, has_diff, summary
    from megatron_resilient.patching.source import SourceTree

    if args.against is not None and not args.against.is_dir():
        raise PatchError(f"--against {args.against} is not a directory")
    findings, _ = _examine()
    chosen = [finding for finding in findings if args.name in (None, finding.name)]
    if not chosen:
        raise PatchError(f"no patch and no reliance is named {args.name}")
    copy = SourceTree([str(args.against)]) if args.against is not None else None
    changed = [finding for finding in chosen if finding.state != "ok"]
    for finding in changed:
        print(summary(finding))
        if has_diff(finding):
            print(diff(finding) if copy is None else full_diff(finding, copy), end="")
    if not changed:
        print("no difference", file=sys.stderr)
    return 1 if changed else 0


def _lock(args: argparse.Namespace) -> int:
    from megatron_resilient.patching.apply import default_registry, lock_file
    from megatron_resilient.patching.lock import Lock
    from megatron_resilient.patching.source import SourceTree

    file = lock_file()
    before = Lock.read(file).targets if file.exists() else {}
    lock = Lock.of_installed(default_registry(), SourceTree())
    lock.write(file)
    added = lock.targets.keys() - before.keys()
    removed = before.keys() - lock.targets.keys()
    changed = [
        name for name in before.keys() & lock.targets.keys() if lock.targets[name] != before[name]
    ]
    for mark, names in (("+", added), ("-", removed), ("~", changed)):
        for name in sorted(names):
            print(f"{mark} {name}")
    print(
        f"{file}: {len(lock.targets)} targets, {len(added)} added, {len(removed)} removed, "
        f"{len(changed)} changed"
    )
    return 0


def _docs(args: argparse.Namespace) -> int:
    from megatron_resilient.patching.apply import default_registry
    from megatron_resilient.patching.page import patches_page

    args.output.write_text(patches_page(default_registry()), encoding="utf-8")
    print(args.output)
    return 0


def _examine(
    only: str | None = None, problems: bool = False
) -> "tuple[Sequence[Finding], list[str]]":
    """Returns the findings and, if asked, what is wrong with aliases and with the lock itself.

    `only` is the value of --groups.
    """
    from megatron_resilient.errors import PatchError
    from megatron_resilient.patching.aliases import alias_problems
    from megatron_resilient.patching.apply import default_registry, lock_file
    from megatron_resilient.patching.lock import RELOCK, Lock
    from megatron_resilient.patching.registry import GROUPS
    from megatron_resilient.patching.source import SourceTree
    from megatron_resilient.patching.verify import verify

    groups = GROUPS if only is None else tuple(only.split(","))
    if unknown := [group for group in groups if group not in GROUPS]:
        raise PatchError(f"--groups {only}: {unknown[0]!r} is not one of {', '.join(GROUPS)}")
    registry, lock, tree = default_registry(), Lock.read(lock_file()), SourceTree()
    findings = verify(registry, lock, tree, groups)
    found: list[str] = []
    if problems:
        found += alias_problems(registry, tree, groups)
        found += (
            f"{name}: in patches.lock, but no patch or reliance names it; run `{RELOCK}`"
            for name in sorted(lock.targets.keys() - registry.targets.keys())
        )
    return findings, found


def _listing(findings: "Sequence[Finding]") -> dict[str, Any]:
    import dataclasses

    from megatron_resilient.patching.registry import Patch

    patches, reliances = [], []
    for finding in findings:
        declared = {
            each.name: getattr(finding.subject, each.name)
            for each in dataclasses.fields(finding.subject)
            if each.name != "make"
        }
        rows = patches if isinstance(finding.subject, Patch) else reliances
        rows.append(declared | {"state": finding.state, "detail": finding.detail})
    return {"upstreams": _versions(findings), "patches": patches, "reliances": reliances}


def _versions(findings: "Sequence[Finding]") -> dict[str, str | None]:
    return {finding.subject.upstream: finding.version for finding in findings}


def _state(finding: "Finding") -> dict[str, Any]:
    return {
        "name": finding.name,
        "target": finding.subject.target,
        "state": finding.state,
        "detail": finding.detail,
    }


def _row(finding: "Finding") -> tuple[str, ...]:
    from megatron_resilient.patching.registry import Patch

    subject = finding.subject
    if isinstance(subject, Patch):
        return (subject.id, subject.target, subject.kind, subject.versions, finding.state)
    return ("-", subject.target, "relies", "-", finding.state)


def _show(findings: "Sequence[Finding]") -> None:
    rows = [_row(finding) for finding in findings]
    if not sys.stdout.isatty():  # whole lines, for grep and awk
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        for row in (COLUMNS, *rows):
            print("  ".join(map(str.ljust, row, widths)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        style = "green" if row[-1] == "ok" else "red"
        table.add_row(*map(Text, row[:-1]), Text(row[-1], style=style))
    Console().print(table)
