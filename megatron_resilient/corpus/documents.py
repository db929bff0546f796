"""Documents out of files: which files are read, in which order, and what text they hold.

Reading is planned first. A plan is a list of sections, each small enough to be one unit of work of
a process, in an order that depends on names and contents only; so the documents come out in the
same order whatever number of processes reads them.
"""

import codecs
import fnmatch
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from megatron_resilient.errors import DataError

JSON_LINES_SUFFIXES = (".jsonl", ".json")
"""Files that hold one JSON object a line; every other file is one document of text."""

MAX_DOCUMENT_BYTES = 256 * 2**20
"""A document is tokenised as a whole, at about 40 bytes of memory per byte of text."""

SECTION_BYTES = 2**20
_BINARY_PROBE_BYTES = 8192
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

EncodingErrors = Literal["error", "skip", "replace"]


@dataclass(frozen=True)
class InputOptions:
    """How inputs are chosen and read.

    Attributes:
        globs: in a folder, only files that match one of these; empty means all.
        excludes: in a folder, files and folders that match one of these are left out. A pattern
            with a slash is compared with the path below the input folder, one without with the
            last name alone.
        json_key: the key of a JSON line whose value is the text.
        encoding_errors: what becomes of a document that is not UTF-8: `error` stops, `skip` leaves
            the document out, `replace` puts U+FFFD where it is broken.
    """

    globs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    json_key: str = "text"
    encoding_errors: EncodingErrors = "error"


@dataclass(frozen=True)
class Section:
    """The documents that begin in bytes `[start_byte, end_byte)` of a file."""

    path: Path
    start_byte: int
    end_byte: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file that belong to this section."""
        return self.end_byte - self.start_byte

    @property
    def is_json_lines(self) -> bool:
        """Whether the file holds a JSON object a line."""
        return self.path.suffix.lower() in JSON_LINES_SUFFIXES


@dataclass(frozen=True)
class InputPlan:
    """What will be read, in order, and what was left out: how many by reason."""

    sections: tuple[Section, ...]
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files that will be read."""
        return sum(section.size_bytes for section in self.sections)


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        text: not empty, and free of lone surrogates, so that it always has a UTF-8 form.
        size_bytes: its length in UTF-8.
        repaired: whether parts that were not UTF-8 became U+FFFD.
    """

    text: str
    size_bytes: int
    repaired: bool


def plan_input(
    paths: Sequence[Path], options: InputOptions, section_bytes: int = SECTION_BYTES
) -> InputPlan:
    """Lists what will be read: the paths in the order given, folders by name.

    A path that is named is read whatever its name or content; hidden and binary files (a NUL in
    the first 8 KiB) are left out of folders only, and links to folders are not followed. JSON-lines
    files are cut into sections of `section_bytes`; a text file is one section.

    Args:
        paths: files and folders.
        options: which files of the folders.
        section_bytes: target size of a section of a JSON-lines file.

    Raises:
        DataError: a path does not exist, is neither a file nor a folder, or a text file is larger
            than a document may be.
    """
    skipped: Counter[str] = Counter()
    sections: list[Section] = []
    seen: set[str] = set()
    for path in paths:
        for file in _files(path, options, skipped):
            identity = os.path.realpath(file)
            if identity in seen:
                skipped["given twice"] += 1
                continue
            seen.add(identity)
            sections.extend(_sections(file, section_bytes))
    return InputPlan(tuple(sections), skipped)


def _files(path: Path, options: InputOptions, skipped: Counter[str]) -> Iterator[Path]:
    if path.is_dir():
        yield from _walk(path, PurePosixPath(), options, skipped)
    elif path.is_file():
        yield path
    elif path.exists():
        raise DataError(f"{path}: neither a file nor a folder; give regular files or folders")
    else:
        raise DataError(f"{path}: no such file or folder; check --input")


def _walk(
    folder: Path, below: PurePosixPath, options: InputOptions, skipped: Counter[str]
) -> Iterator[Path]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        relative = below / entry.name
        path = folder / entry.name
        if _matches(relative, options.excludes):
            skipped["excluded"] += 1
        elif entry.name.startswith("."):
            skipped["hidden"] += 1
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(path, relative, options, skipped)
        elif entry.is_dir():
            skipped["link to a folder"] += 1
        elif not entry.is_file():
            skipped["not a regular file"] += 1
        elif options.globs and not _matches(relative, options.globs):
            skipped["not matched by --glob"] += 1
        elif _is_binary(path):
            skipped["binary"] += 1
        else:
            yield path


def _matches(relative: PurePosixPath, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(str(relative) if "/" in pattern else relative.name, pattern)
        for pattern in patterns
    )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_BINARY_PROBE_BYTES)


def _sections(path: Path, section_bytes: int) -> Iterator[Section]:
    size_bytes = path.stat().st_size
    whole = Section(path, 0, size_bytes)
    if not whole.is_json_lines:
        if size_bytes > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{path}: a document of {size_bytes} bytes, at most {MAX_DOCUMENT_BYTES} can be"
                " tokenised as one; split the file, or make it JSON-lines with a document a line"
            )
        yield whole
        return
    for start_byte in range(0, size_bytes, section_bytes):
        yield Section(path, start_byte, min(start_byte + section_bytes, size_bytes))


def read_documents(
    section: Section, options: InputOptions, skipped: Counter[str]
) -> Iterator[Document]:
    """Yields the documents of a section in file order.

    Text is taken as it is: line ends are kept, only a byte order mark is dropped.

    Args:
        section: what to read.
        options: the key of JSON lines, and what to do about text that is not UTF-8.
        skipped: counts by reason, added to as documents are left out.

    Raises:
        DataError: text that is not UTF-8, a line that is not a JSON object, lacks the key or has
            no string there; the message names the file and the byte or line.
    """
    if section.is_json_lines:
        yield from _json_documents(section, options, skipped)
        return
    data = section.path.read_bytes()
    decoded = _decode(data, section.path, 0, options.encoding_errors, skipped)
    if decoded is not None:
        yield from _document(*decoded, skipped)


def _json_documents(
    section: Section, options: InputOptions, skipped: Counter[str]
) -> Iterator[Document]:
    for offset, line in _lines(section):
        if not line.strip():
            continue
        decoded = _decode(line, section.path, offset, options.encoding_errors, skipped)
        if decoded is None:
            continue
        content, repaired = decoded
        text = _json_text(content, section.path, offset, options.json_key)
        if _LONE_SURROGATE.search(text):
            match options.encoding_errors:
                case "error":
                    raise DataError(
                        f"{_place(section.path, offset)}: the text has a lone surrogate, which has"
                        " no UTF-8 form; use --encoding-errors skip or replace"
                    )
                case "skip":
                    skipped["not UTF-8"] += 1
                    continue
                case "replace":
                    text, repaired = _LONE_SURROGATE.sub("\ufffd", text), True
        yield from _document(text, repaired, skipped)


def _lines(section: Section) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, line) of every line that begins in the section."""
    with section.path.open("rb") as file:
        offset = section.start_byte
        if offset:
            # The line that holds the byte before the section belongs to an earlier section.
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while offset < section.end_byte:
            line = file.readline(MAX_DOCUMENT_BYTES + 1)
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(
                    f"{_place(section.path, offset)}: a line of more than {MAX_DOCUMENT_BYTES}"
                    " bytes cannot be tokenised as one document; split it"
                )
            if not line:  # the file has shrunk since it was planned
                return
            yield offset, line
            offset += len(line)


def _decode(
    data: bytes, path: Path, offset: int, encoding_errors: EncodingErrors, skipped: Counter[str]
) -> tuple[str, bool] | None:
    """Returns (text, whether it was repaired), or None for a document that is skipped."""
    mark = len(codecs.BOM_UTF8) if offset == 0 and data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[mark:].decode("utf-8"), False
    except UnicodeDecodeError as error:
        match encoding_errors:
            case "error":
                raise DataError(
                    f"{path}: not UTF-8 at byte {offset + mark + error.start} ({error.reason});"
                    " convert the file, leave it out, or use --encoding-errors skip or replace"
                ) from error
            case "skip":
                skipped["not UTF-8"] += 1
                return None
            case "replace":
                return data[mark:].decode("utf-8", "replace"), True


def _json_text(content: str, path: Path, offset: int, key: str) -> str:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{_place(path, offset)}: not JSON ({reason}); each line of a .jsonl or .json file must"
            " be one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{_place(path, offset)}: a JSON {type(value).__name__}, not an object; each line must"
            f' be like {{"{key}": "..."}}'
        )
    if key not in value:
        raise DataError(
            f"{_place(path, offset)}: no key {key!r}; it has"
            f" {', '.join(map(repr, sorted(value))) or 'none'}: choose one with --json-key"
        )
    text = value[key]
    if not isinstance(text, str):
        raise DataError(
            f"{_place(path, offset)}: {key!r} holds a {type(text).__name__}, not a string;"
            " choose another key with --json-key"
        )
    return text


def _document(text: str, repaired: bool, skipped: Counter[str]) -> Iterator[Document]:
    if text:
        yield Document(text, len(text.encode()), repaired)
    else:
        skipped["empty"] += 1


def _place(path: Path, offset: int) -> str:
    """Returns `file:line` of a byte; counts lines only when a message needs them."""
    with path.open("rb") as file:
        line = 1
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            line += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{line}"
