"""Turns text or JSON-lines into a dataset that Megatron's --data-path reads.

A folder is read with all below it, in the order of names, without hidden and binary files. A .jsonl
or .json file holds one document a line, any other file is one document. Writes PREFIX.bin and
PREFIX.idx, with --train-tokenizer also PREFIX.model, and says which flags to train with.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_resilient.mcore.data_preparation import PreparationSummary, Progress

HELP = "turn text or JSON-lines into a dataset for --data-path"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="path of the dataset, without .bin or .idx",
    )
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer-model", metavar="M", help="a SentencePiece model")
    tokenizer.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="train a SentencePiece model on the input, e.g. 4096",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="default: %(default)s")
    parser.add_argument(
        "--glob",
        action="append",
        default=[],
        metavar="PATTERN",
        help="of a folder read only files that match, e.g. '*.py' (may be repeated)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="of a folder leave out files and folders that match, by name, or by path if there is a"
        " slash in it (may be repeated)",
    )
    parser.add_argument(
        "--encoding-errors",
        choices=("error", "skip", "replace"),
        default="error",
        help="stop at a document that is not UTF-8 (default), leave it out, or put U+FFFD there",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with </s>, Megatron's EOD"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(len(os.sched_getaffinity(0)), 8),
        metavar="N",
        help="processes that tokenise (default here: %(default)s); the output is the same for any",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.* if they exist")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Prepares the data; returns 0."""
    from megatron_resilient.corpus.documents import InputOptions
    from megatron_resilient.errors import ConfigError
    from megatron_resilient.mcore.data_preparation import PreparationRequest, prepare

    if args.output.endswith(os.sep):
        raise ConfigError(f"--output {args.output}: add a file name to the folder")
    request = PreparationRequest(
        inputs=tuple(map(Path, args.input)),
        output=Path(args.output),
        input_options=InputOptions(
            tuple(args.glob), tuple(args.exclude), args.json_key, args.encoding_errors
        ),
        tokenizer_model=Path(args.tokenizer_model) if args.tokenizer_model else None,
        vocab_size=args.train_tokenizer,
        append_end_of_document=args.append_eod,
        workers=args.workers,
        overwrite=args.overwrite,
    )
    with _terminable(), _progress_bar() as progress:
        summary = prepare(request, progress)
    if args.json:
        print(json.dumps(summary.to_json(), indent=2))
    else:
        _show(summary, args.overwrite)
    return 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM, which a batch system sends, clean up like any other end."""

    def stop(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress_bar() -> Iterator["Progress"]:
    """Shows what is going on, on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("looking at the input", total=None)

        def update(what: str, done_bytes: int, total_bytes: int) -> None:
            if bar.tasks[task].description != what:
                bar.reset(task, total=total_bytes or None, description=what)
            bar.update(task, completed=done_bytes)

        yield update


def _show(summary: "PreparationSummary", replaced: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = _rows(summary)
    console = Console(highlight=False)
    if console.is_terminal:
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for name, value in rows:
            print(f"{name:<22}{value}")
    for note in _notes(summary, replaced):
        print(f"note: {note}")
    print("Pass to Megatron:")
    print(f"  {shlex.join(summary.pretrain_flags)}")


def _rows(summary: "PreparationSummary") -> list[tuple[str, str]]:
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items())
    seconds = ", ".join(f"{phase} {taken:.1f}" for phase, taken in summary.seconds.items())
    return [
        ("documents", f"{summary.documents:,}"),
        ("tokens", f"{summary.tokens:,} of {summary.vocab_size:,} kinds, {summary.token_dtype}"),
        ("bytes of text", f"{summary.text_bytes:,}"),
        ("tokens per byte", f"{summary.tokens_per_byte:.4f}"),
        ("left out", skipped or "nothing"),
        ("seconds", seconds.replace("_", " ")),
    ]


def _notes(summary: "PreparationSummary", replaced: bool) -> Iterator[str]:
    if not summary.end_of_document:
        yield "documents are not told apart in training; --append-eod ends each with </s>"
    if (fraction := summary.trained_on_fraction) is not None and fraction < 1:
        yield f"the tokenizer was trained on {fraction:.1%} of the lines, drawn at random"
    if summary.unknown_tokens:
        yield f"{summary.unknown_tokens:,} tokens are <unk>: the tokenizer lacks their characters"
    if summary.altered_documents:
        yield (
            f"{summary.altered_documents:,} of {summary.documents:,} documents do not decode to the"
            " same text: the tokenizer normalises it, or it holds U+2581"
        )
    if summary.repaired_documents:
        yield f"{summary.repaired_documents:,} documents were not UTF-8 and hold U+FFFD now"
    if summary.removed_caches:
        yield "Megatron's cached indices of the older dataset were removed"
    if replaced:
        yield "with --data-cache-path, empty that folder: its indices know the path, not the data"
