"""Finds every command that README.md, CONTRIBUTING.md and docs/*.md show or name.

In a fenced block without a language, or of a shell, a command is what stands behind `$ `; without
such prompts every line is one, if any begins like one. In running text it is what stands in
backquotes and begins like one, the program's name left out or not: `checkpoint gc DIR`,
`simulate --recommend`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_resilient.cli import COMMANDS, PROGRAM

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_SHELLS = ("", "bash", "sh", "console")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_PREFIX = r"(?:[A-Z_]+=\S* +)*(?:sudo +)?(?:[A-Z_]+=\S* +)*"
_PROGRAM = (
    rf"(?:{PROGRAM}|make|torchrun|python3?|pip|source(?= \S)|head|sbatch|srun|kubectl|docker"
    r"|git|apt-get|\.venv/bin/\S+|(?:examples|tools|benchmarks)/\S+\.(?:py|sh|sbatch)|testbed\.py)"
)
_STARTS = re.compile(rf"{_PREFIX}{_PROGRAM}(?: |$)")
# Without the program's name a span must have more than the command: `run` may mean anything.
_SHORT = re.compile(rf"(?:{'|'.join(COMMANDS)}) \S")


@dataclass(frozen=True)
class Shown:
    """A command on a page.

    Attributes:
        page: its path from the top of the tree.
        line: where its block, or the command itself, begins.
        text: in one line, without prompt and comment; short forms with the program's name.
        output: what the page says that it prints; None if nothing.
        short: it stood there without the program's name.
    """

    page: str
    line: int
    text: str
    output: str | None = None
    short: bool = False


def shown_commands(page: Path) -> Iterator[Shown]:
    """Yields the commands of a page."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    for fence in _FENCE.finditer(text):
        if fence[1] in _SHELLS:
            line = text[: fence.start()].count("\n") + 1
            yield from (Shown(name, line, *found) for found in in_block(fence[2]))
    prose = _FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
    for span in _SPAN.finditer(prose):
        line = prose[: span.start()].count("\n") + 1
        words = " ".join(span[1].replace("\\|", "|").split())
        if _STARTS.match(words):
            yield Shown(name, line, words)
        elif _SHORT.match(words):
            yield Shown(name, line, f"{PROGRAM} {words}", short=True)


def in_block(block: str) -> Iterator[tuple[str, str | None]]:
    """Yields (command, its output or None) of a fenced block."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    prompts = [number for number, line in enumerate(lines) if line.lstrip().startswith("$ ")]
    if not prompts:
        # Where one line is a command all are: of a program unknown here, too.
        if any(map(_STARTS.match, lines)):
            yield from ((bare(line), None) for line in lines if bare(line))
        return
    for number, end in zip(prompts, [*prompts[1:], len(lines)], strict=True):
        # An indented prompt is part of the output of something else.
        transcript = lines[number].startswith("$ ")
        below = "\n".join(lines[number + 1 : end])
        yield bare(lines[number].lstrip()[2:]), below if transcript else None


def bare(line: str) -> str:
    """Returns a command line without the comment at its end."""
    return re.sub(r"(?:^|\s+)# .*$", "", line).strip()


def files_of(page: Path) -> dict[str, str]:
    """Returns the files that a page shows: {name: text}.

    The name of a json or csv block is the first one of that kind in the lines above it.
    """
    text = page.read_text(encoding="utf-8")
    files = {}
    for fence in _FENCE.finditer(text):
        if fence[1] in ("json", "csv"):
            above = text[: fence.start()].rstrip().rpartition("\n\n")[2]
            names = re.findall(rf"`([\w-]+\.{fence[1]})`", above)
            if names:
                files[names[0]] = fence[2]
    return files
