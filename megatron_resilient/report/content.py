"""What the template shows: plain data, still to be escaped."""

from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True)
class Fact:
    """A name and a value, with a note below it in a tile."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Exit:
    """How the run ended: in words, and `good`, `bad` or `open`."""

    text: str
    mood: str


@dataclass(frozen=True)
class Column:
    """A column: its heading, and `number`, `name` (short, never broken) or `text`."""

    name: str
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: What it lists.
        columns: From the left.
        rows: One text a column.
        left_out: How many rows before the first one are not shown.
        folded: Whether the reader has to open it.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]]
    left_out: int = 0
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        key: Its id in the page.
        title: Its heading.
        lead: What there is to see, in one or two sentences.
        pictures: SVG elements.
        tables: Below them.
    """

    key: str
    title: str
    lead: str = ""
    pictures: list[Markup] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
