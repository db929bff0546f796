"""Reads files of failures: ours, and those of three public collections.

None of these files comes with this package; docs/simulation.md says where they are from.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from megatron_resilient.errors import TraceError
from megatron_resilient.input_files import MOST, read_text
from megatron_resilient.simulation.trace import MOST_NODES, Kind, NodeEvent, Trace

HEADER = "seconds,event,node"
_KINDS: dict[str, Kind] = {"add": "add", "remove": "remove", "leave": "leave"}
_COUNTED = re.compile(r"(\d{4}-\d\d-\d\d)\s*,\s*(\d\d:\d\d:\d\d)\s*,\s*(\d+)")


def read_trace(path: str | Path, seed: int = 0) -> Trace:
    """Reads a trace, whichever of four formats it has.

    - `seconds,event,node` in its first line, then such rows; `event` is add, remove or leave;
    - `milliseconds,add or remove,node` (Bamboo, Oobleck), without a first line;
    - `[milliseconds, event, {"nodes": [...], ...}]`, one a line (Parcae);
    - `date, time, nodes` (Bamboo's counts). Which nodes go is not in it, and is drawn.

    Args:
        path: of the file.
        seed: of what is drawn.

    Raises:
        TraceError: it is none of these; the message says where.
    """
    lines = read_text(path, TraceError).splitlines()
    rows = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise TraceError(f"{path}: no events")
    first = rows[0][1]
    end: float | None = None
    if "".join(first.split()) == HEADER:
        events = list(_rows(rows[1:], 1.0, str(path)))
    elif first.startswith("["):
        events, end = _intervals(rows, str(path))
    elif _COUNTED.fullmatch(first):
        events, end = _counts(rows, str(path), seed)
    elif re.match(r"[\d.]+\s*,\s*(add|remove|leave)\s*,", first):
        events = list(_rows(rows, 1e-3, str(path)))
    else:
        raise TraceError(
            f"{path}: line {rows[0][0]} is {first[:60]!r}: begin with a line {HEADER!r}, then one "
            "row for each event"
        )
    return Trace.of(events, end, str(path))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes the CSV that `read_trace` reads."""
    rows = [f"{event.seconds!r},{event.kind},{event.node}" for event in trace.events()]
    Path(path).write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")


def _rows(rows: Sequence[tuple[int, str]], unit: float, path: str) -> Iterator[NodeEvent]:
    """Yields the events of rows `time,event,node`."""
    for number, line in rows:
        parts = [part.strip() for part in line.split(",")]
        try:
            at, kind, node = float(parts[0]) * unit, _KINDS[parts[1]], parts[2]
        except (ValueError, KeyError, IndexError):
            at, kind, node = -1.0, "add", ""
        if not (0 <= at <= MOST and node and len(parts) == 3):
            raise TraceError(
                f"{path}: line {number} is {line[:60]!r}: expected a time, one of "
                f"{', '.join(_KINDS)}, and the name of a node"
            )
        yield NodeEvent(at, kind, node)


def _intervals(rows: Sequence[tuple[int, str]], path: str) -> tuple[list[NodeEvent], float]:
    """Returns the events of Parcae's intervals, and the end of the last one."""
    events, end = [], 0.0
    for number, line in rows:
        try:
            milliseconds, kind, what = json.loads(line)
            at = float(milliseconds) / 1000
            end = at + float(what["duration"]) / 1000
            # A text would be one node for each of its letters.
            if not (isinstance(what["nodes"], list) and 0 <= at <= end <= MOST):
                raise ValueError
            if kind != "no-op":
                events += [NodeEvent(at, _KINDS[kind], str(node)) for node in what["nodes"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise TraceError(
                f"{path}: line {number} is {line[:60]!r}: expected "
                '[milliseconds, "add", "remove" or "no-op", {"nodes": [...], "duration": ..}]'
            ) from None
    return events, end


def _counts(rows: Sequence[tuple[int, str]], path: str, seed: int) -> tuple[list[NodeEvent], float]:
    """Returns events that give the counts of nodes, and the time of the last count.

    A row that is not later than rows before it takes their place: these files go on with an old
    count until the new one is known, and then go back.
    """
    counted: list[tuple[datetime, int]] = []
    for number, line in rows:
        match = _COUNTED.fullmatch(line)
        try:
            at = datetime.fromisoformat(f"{match[1]}T{match[2]}") if match else None
        except ValueError:
            at = None
        if match is None or at is None:
            raise TraceError(
                f"{path}: line {number} is {line[:60]!r}: expected 'date, time, number of nodes'"
            )
        while counted and counted[-1][0] >= at:
            counted.pop()
        if len(match[3]) > 9 or int(match[3]) > MOST_NODES:
            raise TraceError(f"{path}: line {number} has more than {MOST_NODES:,} nodes")
        counted.append((at, int(match[3])))
    draw = random.Random(seed)
    present: list[str] = []
    events = []
    names = 0
    begin = counted[0][0]
    for at, number in counted:
        seconds = (at - begin).total_seconds()
        while len(present) > number:
            node = present.pop(draw.randrange(len(present)))
            events.append(NodeEvent(seconds, "remove", node))
        while len(present) < number:
            names += 1
            present.append(f"node{names}")
            events.append(NodeEvent(seconds, "add", present[-1]))
    return events, (counted[-1][0] - begin).total_seconds()
