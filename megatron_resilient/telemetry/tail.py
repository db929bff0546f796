"""Reads the events of a run that goes on, each once."""

import os
from pathlib import Path

from megatron_resilient.telemetry.log import EVENTS_FILE
from megatron_resilient.telemetry.reader import Event, parse_lines


class EventTail:
    """Follows `events.jsonl` of one run; the file may come later.

    Args:
        run_dir: directory of the run.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._path = Path(run_dir) / EVENTS_FILE
        self._bytes = self._lines = 0  # read so far

    def new_events(self) -> list[Event]:
        """Returns the events since the last call whose lines have their ends.

        Raises:
            TelemetryError: a damaged line; the next call begins after what was read with it.
            OSError: the file is there and cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        first = self._lines + 1
        self._bytes += len(whole)
        self._lines += len(lines)
        return parse_lines(lines, self._path, first)
