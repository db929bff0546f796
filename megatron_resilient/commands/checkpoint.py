"""Says what a checkpoint directory holds and whether it is whole, and takes away what may go."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_resilient.commands.flag_types import count

if TYPE_CHECKING:
    from megatron_resilient.checkpoint.diff import Difference, Side

HELP = "list, verify, collect, compare or consolidate the checkpoints of a directory"
_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (text, add_flags, _) in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.add_argument("directory", type=Path, metavar="DIR", help="the folder of --save")
        add_flags(action)
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Returns 1 when something is damaged (verify) or differs (diff), else 0."""
    return _ACTIONS[args.action][2](args)


def _no_flags(parser: argparse.ArgumentParser) -> None:
    pass


def _verify_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="look at sizes and headers, and hash nothing"
    )


def _gc_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-last",
        type=count(most=sys.maxsize),
        metavar="N",
        help="keep the N newest checkpoints that miss no file, and let older ones go; without it "
        "and --keep-every only what no checkpoint needs goes",
    )
    parser.add_argument(
        "--keep-every",
        type=count(most=sys.maxsize),
        metavar="STEPS",
        help="also keep the checkpoints of steps that are multiples of STEPS",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def _diff_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="OTHER_DIR", help="a second folder (default: DIR)"
    )
    parser.add_argument(
        "--step", type=int, help="of DIR (default: the newest, or the one before in the same DIR)"
    )
    parser.add_argument("--other-step", type=int, metavar="STEP", help="default: the newest")
    parser.add_argument(
        "--quick", action="store_true", help="compare versions and shapes, and read no values"
    )
    parser.add_argument("--sizes", action="store_true", help="also say how far values are apart")


def _ls(args: argparse.Namespace) -> int:
    from megatron_resilient.checkpoint.survey import listing

    document = listing(args.directory)
    if args.json:
        print(json.dumps(document, indent=2))
        return 0
    rows = []
    for each in document["steps"]:
        if not each["readable"]:
            rows.append((str(each["step"]), "unreadable", "", "", "", "", each["why"]))
            continue
        fresh = each["experts"] - each["stale_experts"]
        rows.append(
            (
                str(each["step"]),
                "exact" if each["exact"] else "partial",
                f"{fresh} of {each['experts']}",
                str(each["oldest_step"]),
                _bytes(each["bytes"]),
                _bytes(each["new_bytes"]),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["written"]))
                + f" by {each['run']}",
            )
        )
    columns = ("step", "kind", "experts of it", "oldest", "size", "new", "written")
    _table(columns, rows, right=(0, 2, 3, 4, 5))
    if not rows:
        print(f"{args.directory}: no checkpoint")
    if held := document["held_by"]:
        print(f"held by run {held['run']}, host {held['host']}, pid {held['pid']}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron_resilient.checkpoint.survey import verification

    with _progress("verifying") as (begin, done):
        document = verification(args.directory, not args.quick, begin, done)
    whole = bool(document["steps"]) and all(each["complete"] for each in document["steps"])
    if args.json:
        print(json.dumps(document, indent=2))
        return 0 if whole else 1
    rows = [
        (
            str(each["step"]),
            "yes" if each["complete"] else "no",
            str(len(each["damaged"])),
            str(each["experts"]),
            str(each["stale_experts"]),
        )
        for each in document["steps"]
    ]
    columns = ("step", "complete", "damaged files", "experts", "older than it")
    _table(columns, rows, right=(0, 2, 3, 4), bad=lambda row: row[1] == "no")
    told = {}
    for step in document["steps"]:
        for each in step["damaged"]:
            expert = f" (layer {each['layer']}, expert {each['expert']})"
            told[each["file"]] = (expert if each["layer"] is not None else "") + f" {each['why']}"
    for file, why in list(told.items())[:_SHOWN]:
        print(f"{file}{why}")
    if len(told) > _SHOWN:
        print(f"and {len(told) - _SHOWN} files more: see --json")
    usable = document["usable_step"]
    print("nothing can be restored" if usable is None else f"a restore loads step {usable}")
    return 0 if whole else 1


def _gc(args: argparse.Namespace) -> int:
    from megatron_resilient.checkpoint import gc, lock

    kept = (args.keep_last, args.keep_every)
    if args.dry_run:
        held = lock.holder(args.directory) is not None
        planned = gc.plan(args.directory, *kept, held=held)
    else:
        planned = gc.collect(args.directory, *kept)
    if args.json:
        document = {
            "directory": str(args.directory),
            "dry_run": args.dry_run,
            "kept": planned.kept,
            "manifests": planned.manifests,
            "files": planned.files,
            "bytes": planned.bytes,
            "notes": planned.notes,
        }
        print(json.dumps(document, indent=2))
        return 0
    for note in planned.notes:
        print(note)
    verb = "would go" if args.dry_run else "gone"
    print(f"kept: {_steps(planned.kept)}")
    print(
        f"{verb}: {_steps(planned.manifests)}; {len(planned.files)} files, {_bytes(planned.bytes)}"
    )
    return 0


def _diff(args: argparse.Namespace) -> int:
    from megatron_resilient.checkpoint.diff import difference
    from megatron_resilient.telemetry.values import encode

    first, second = _sides(args)
    with _progress("comparing") as (begin, done):
        begin(sum(file.bytes for file in first.manifest.files))
        found = difference(first, second, not args.quick, args.sizes, lambda file: done(file.bytes))
    if args.json:
        document = {
            "first": {"directory": str(first.directory), "step": first.manifest.step},
            "second": {"directory": str(second.directory), "step": second.manifest.step},
            "same": found.is_empty,
            "model": found.model,
            "only_first": found.only_first,
            "only_second": found.only_second,
            "types": found.types,
            "versions": [each._asdict() for each in found.versions],
            "values": None
            if found.values is None
            else [encode(each._asdict(), "values") for each in found.values],
        }
        print(json.dumps(document, indent=2))
    else:
        _show_difference(first, second, found)
    return 0 if found.is_empty else 1


def _sides(args: argparse.Namespace) -> "tuple[Side, Side]":
    from megatron_resilient.checkpoint import directory as places
    from megatron_resilient.checkpoint.diff import Side
    from megatron_resilient.errors import CheckpointError

    def side(directory: Path, step: int | None, place: int) -> Side:
        if not places.is_ours(directory):
            raise CheckpointError(f"{directory}: is no checkpoint directory of ours")
        if step is None:
            steps = places.manifests(directory)
            if len(steps) <= place:
                raise CheckpointError(f"{directory}: has {len(steps)} checkpoints: name a step")
            step = steps[place]
        return Side(directory, places.read_manifest(places.manifest_path(directory, step)))

    other = args.other or args.directory
    second = side(other, args.other_step, 0)
    return side(args.directory, args.step, 1 if args.other is None else 0), second


def _show_difference(first: "Side", second: "Side", found: "Difference") -> None:
    def name(side: "Side") -> str:
        return f"{side.directory} step {side.manifest.step}"

    def lines(title: str, texts: Sequence[str]) -> None:
        for text in texts[:_SHOWN]:
            print(f"{title}: {text}")
        if len(texts) > _SHOWN:
            print(f"{title}: {len(texts) - _SHOWN} more: see --json")

    print(f"{name(first)} and {name(second)}")
    lines("model", found.model)
    lines("only in the first", found.only_first)
    lines("only in the second", found.only_second)
    lines("shape or type", found.types)
    lines(
        "version",
        [
            f"layer {each.layer}, expert {each.expert}: {each.first}, {each.second}"
            for each in found.versions
        ],
    )
    lines(
        "values",
        [
            f"{each.key}|{each.kind}: {each.elements:,} elements"
            + (
                ""
                if each.max_absolute is None
                else f", at most {each.max_absolute:.3g} apart, relative {each.max_relative:.3g}"
            )
            for each in found.values or ()
        ],
    )
    if found.is_empty:
        print("no difference" + ("" if found.values is not None else " (values were not read)"))


@contextlib.contextmanager
def _progress(what: str) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Draws a bar on a terminal: yields what is told all bytes, and what is told those done."""
    if not sys.stderr.isatty():
        yield (lambda _: None), (lambda _: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield (
            lambda total: bar.update(task, total=total),
            lambda count: bar.advance(task, count),
        )


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int],
    bad: Callable[[Sequence[str]], bool] = lambda row: row[1] == "unreadable",
) -> None:
    if not rows:
        return
    if not sys.stdout.isatty():  # whole lines, for grep and awk
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = (
                cell.rjust(width) if place in right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row), style="red" if bad(row) else None)
    Console().print(table)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.4g} TB"


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "no checkpoint"
    shown = ", ".join(map(str, steps[:_SHOWN])) + (", ..." if len(steps) > _SHOWN else "")
    return f"step {shown}" if len(steps) == 1 else f"{len(steps)} checkpoints, steps {shown}"


def _consolidate_flags(parser: argparse.ArgumentParser) -> None:
    from megatron_resilient.commands import checkpoint_consolidate

    checkpoint_consolidate.configure(parser)


def _consolidate(args: argparse.Namespace) -> int:
    from megatron_resilient.commands import checkpoint_consolidate

    return checkpoint_consolidate.run(args)


# {action: (what it does, what adds its flags, what runs it)}. An action with a module of its own
# gets two functions here that import it.
_ACTIONS: dict[
    str,
    tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]],
] = {
    "ls": ("list the checkpoints; looks at manifests only", _no_flags, _ls),
    "verify": (
        "hash all files, and say what is damaged and what can be used",
        _verify_flags,
        _verify,
    ),
    "gc": ("take away what no checkpoint needs, and old checkpoints", _gc_flags, _gc),
    "diff": ("say what differs between two checkpoints", _diff_flags, _diff),
    "consolidate": (
        "write one checkpoint in Megatron's own format (torch_dist), which stock Megatron loads "
        "and goes on from",
        _consolidate_flags,
        _consolidate,
    ),
}
