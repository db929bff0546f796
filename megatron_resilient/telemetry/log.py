"""The writer of `events.jsonl`."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry.kinds import COMMON, KINDS, check_event
from megatron_resilient.telemetry.values import encode

EVENTS_FILE = "events.jsonl"

# Closes a line that its writer did not finish. A whole line ends in "}", so a reader can tell.
TORN_SEAL = b" #torn\n"

_RESERVED = frozenset(field.name for field in COMMON)


class EventLog:
    """Appends events to `run_dir/events.jsonl`, one JSON object a line.

    Several processes may write the same file at once, and a killed one harms no line but the one
    it was writing: an event is one `write` on an `O_APPEND` descriptor, and a writer that finds an
    unfinished last line closes it before it writes. That holds on file systems where such a write
    is atomic: local ones, Lustre, GPFS; on NFS only among the processes of one host. Events
    survive the death of their writer at once, and that of the host when its kernel has written
    them back; there is no fsync.

    Attributes:
        rank: The writer's rank; None for a process that is no rank. May be set after a recovery.
        generation: Written into every event. To be set after a recovery.
        node: The writer's node, if it is known.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        rank: int | None,
        generation: int = 0,
        node: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the file; makes it, and the directory, if there is none.

        Args:
            run_dir: Directory of the run.
            rank: See the class.
            generation: See the class.
            node: See the class.
            clock: Gives the time of an event, in seconds since 1970.

        Raises:
            OSError: The directory or the file cannot be made or opened.
        """
        self.rank = rank
        self.generation = generation
        self.node = node
        self._clock = clock
        self._path = Path(run_dir) / EVENTS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Read as well, to see how the last line ends.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    @property
    def path(self) -> Path:
        """The file of events."""
        return self._path

    def emit(self, event: str, step: int | None = None, **fields: object) -> None:
        """Appends one event.

        Args:
            event: A name in `KINDS`.
            step: The training step that it belongs to; None for none.
            **fields: The fields of that kind, and any others; plain Python values, SI units or
                tokens.

        Raises:
            TelemetryError: An unknown kind, a required field missing, a field of another type, a
                name that the log itself writes. Nothing was written then.
            TypeError: A value that is not a plain Python one. Nothing was written then.
            OSError: The write failed.
        """
        if event not in KINDS:
            raise TelemetryError(f"no event is called {event!r}; there are: {', '.join(KINDS)}")
        if taken := _RESERVED & fields.keys():
            raise TelemetryError(
                f"{event}: the log itself writes {', '.join(sorted(taken))}; use another name"
            )
        record: dict[str, object] = {
            "time": self._clock(),
            "event": event,
            "step": step,
            "generation": self.generation,
            "rank": self.rank,
        }
        if self.node is not None:
            record["node"] = self.node
        record.update(fields)
        record = {name: encode(value, f"{event}: {name}") for name, value in record.items()}
        check_event(record)
        self._append(json.dumps(record, allow_nan=False, separators=(", ", ": ")).encode() + b"\n")

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            raise TelemetryError(f"{self._path}: the log is closed; open a new one")
        # If the line that we saw unfinished is only on its way, the seal makes a line of its own.
        data = line if self._ends_with_a_line() else TORN_SEAL + line
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(
                f"{self._path}: wrote {written} of {len(data)} bytes of an event; "
                "is the file system full?"
            )

    def _ends_with_a_line(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n"
