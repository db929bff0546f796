"""The reader of `events.jsonl`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry.kinds import check_event
from megatron_resilient.telemetry.log import EVENTS_FILE, TORN_SEAL

# One line of the file; `kinds.COMMON` and `kinds.KINDS` say which fields there are.
Event = dict[str, Any]


def read_events(run_dir: str | os.PathLike[str]) -> list[Event]:
    """Returns the events of a run in the order in which they were written.

    A line that its writer could not finish is left out: the last one, or one that a later writer
    closed. Any other line that is not an event is an error. May be called while a run writes.

    Args:
        run_dir: Directory of the run.

    Raises:
        TelemetryError: No such directory, no events in it, or a damaged line (named by number).
    """
    path = Path(run_dir) / EVENTS_FILE
    if not path.parent.is_dir():
        raise TelemetryError(f"{path.parent}: no such directory; give the directory of a run")
    if not path.is_file():
        raise TelemetryError(
            f"{path.parent}: holds no {EVENTS_FILE}; give the directory that a run wrote to"
        )
    *lines, tail = path.read_bytes().split(b"\n")
    events = parse_lines(lines, path)
    if _is_whole(tail):
        events.append(_parse(tail, f"{path}:{len(lines) + 1}"))
    return events


def parse_lines(lines: Iterable[bytes], path: Path, first: int = 1) -> list[Event]:
    """Returns the events of lines that have their ends, as `read_events` does.

    Args:
        lines: without the ends.
        path: of the file, for errors.
        first: number of the first line in it.

    Raises:
        TelemetryError: a damaged line.
    """
    seal = TORN_SEAL.rstrip(b"\n")
    events = []
    for number, line in enumerate(lines, start=first):
        if not line.endswith(seal):
            events.append(_parse(line, f"{path}:{number}"))
        elif _is_whole(torn := line.removesuffix(seal)):
            events.append(_parse(torn, f"{path}:{number}"))
    return events


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse(line: bytes, where: str) -> Event:
    try:
        event = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise TelemetryError(
            f"{where}: not a JSON object ({error}); remove or mend that line"
        ) from error
    if not isinstance(event, dict):
        raise TelemetryError(f"{where}: not a JSON object; remove or mend that line")
    try:
        check_event(event)
    except TelemetryError as error:
        raise TelemetryError(f"{where}: {error}") from None
    return event


def _is_whole(unfinished: bytes) -> bool:
    """Whether a line without its end lacks no more than that: an object ends where it closes."""
    try:
        return isinstance(_DECODER.decode(unfinished.decode()), dict)
    except (ValueError, RecursionError):
        return False
