"""What workers print: each line with the worker's name before it, or into files."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

# What megatron_resilient.error_report says: `script.py: rank 3: PlanError: ...`.
_NAMED_ERROR = re.compile(r"^[^\s:]+:(?: rank \d+:)? (?P<error>\w*Error: .*)$")
_LONGEST_LINE = 1 << 16
_STDERR = 2


class WorkerOutput:
    """One stream of one worker, as the agent sees it.

    Attributes:
        write_end: descriptor for the worker; to be closed here once that was forked.
        read_end: descriptor to poll; -1 where the worker writes into a file itself.
    """

    def __init__(
        self, name: str, target: int, log: Path | None, on_error: Callable[[str], None]
    ) -> None:
        """Opens it.

        Args:
            name: stands before each line.
            target: descriptor that lines go to: 1 or 2.
            log: file that they go to instead. Errors of ours are shown all the same, at the end.
            on_error: is given each error of ours on descriptor 2, which then does not show it.
        """
        self._name, self._target, self._log, self._on_error = name, target, log, on_error
        self._rest = b""
        self._start = 0
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self.write_end = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._start = os.fstat(self.write_end).st_size
            self.read_end = -1
        else:
            self.read_end, self.write_end = os.pipe()
            os.set_blocking(self.read_end, False)

    def close_write_end(self) -> None:
        """Leaves the write end to the worker alone."""
        os.close(self.write_end)
        self.write_end = -1

    def forward(self) -> None:
        """Passes on what has come."""
        while self.read_end >= 0:
            try:
                chunk = os.read(self.read_end, _LONGEST_LINE)
            except BlockingIOError:
                return
            if not chunk:
                self._finish()
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _LONGEST_LINE:
                lines.append(self._rest)
                self._rest = b""
            self._pass_on(lines)

    def close(self) -> None:
        """Passes on the rest, once the worker has ended; its children may hold the pipe open."""
        self.forward()
        self._finish()
        if self._log is not None and self._target == _STDERR:
            with open(self._log, "rb") as log:
                log.seek(self._start)
                for line in log.read().decode(errors="replace").splitlines():
                    if found := _NAMED_ERROR.match(line):
                        self._on_error(found["error"])

    def _finish(self) -> None:
        if self.read_end < 0:
            return
        if self._rest:
            self._pass_on([self._rest])
            self._rest = b""
        os.close(self.read_end)
        self.read_end = -1

    def _pass_on(self, lines: list[bytes]) -> None:
        prefix = f"[{self._name}] ".encode()
        shown = []
        for line in lines:
            if self._target == _STDERR and (
                found := _NAMED_ERROR.match(line.decode(errors="replace"))
            ):
                self._on_error(found["error"])
            else:
                shown.append(prefix + line + b"\n")
        if shown:
            _write_all(self._target, b"".join(shown))


def _write_all(descriptor: int, data: bytes) -> None:
    # Nobody reads what we print any more: that does not end the training.
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]
