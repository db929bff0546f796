"""Renders the tables of docs/telemetry.md from the kinds; prints them when run as a script."""

from collections.abc import Iterable

from megatron_resilient.telemetry import COMMON, KINDS, Field


def field_table(fields: Iterable[Field]) -> str:
    rows = ["| field | type | | meaning |", "|---|---|---|---|"]
    for field in fields:
        presence = "always" if field.required else ""
        rows.append(f"| `{field.name}` | {field.type} | {presence} | {field.meaning} |")
    return "\n".join(rows)


def event_sections() -> str:
    """Returns the part of the page that describes every kind of event."""
    parts = ["### Every event\n\n" + field_table(COMMON)]
    for kind in KINDS.values():
        meaning = kind.meaning[0].upper() + kind.meaning[1:]
        needs_step = " Its `step` is never null." if kind.needs_step else ""
        parts.append(f"### `{kind.name}`\n\n{meaning}.{needs_step}\n\n{field_table(kind.fields)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(event_sections(), end="")
