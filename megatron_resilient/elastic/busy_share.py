"""Where the main thread is: in a collective, or at work of its own; sampled from another thread."""

import os
import sys
import threading
from types import FrameType

# Frames of these mean that the thread waits for other ranks (or does that to come to them).
_COLLECTIVE_FILES = (
    os.path.join("torch", "distributed", "distributed_c10d.py"),
    os.path.join("torch", "distributed", "rendezvous.py"),
    os.path.join("elastic", "fenced_wait.py"),
)
_DEEPEST = 12  # frames; a collective's own frames are the innermost ones


class BusyShare:
    """Counts in what share of its samples the main thread was outside collectives.

    A sample costs some ten microseconds of the calling thread. On a GPU collectives only enqueue;
    there the wait shows up in the next synchronisation and counts as busy.
    """

    def __init__(self, thread_id: int | None = None) -> None:
        """Watches the main thread unless another one is named."""
        self._thread_id = thread_id or threading.main_thread().ident
        self._samples = 0
        self._busy = 0

    def sample(self) -> None:
        """Looks once."""
        frame = sys._current_frames().get(self._thread_id or 0)
        if frame is not None:
            self._samples += 1
            self._busy += not _in_collective(frame)

    def take(self) -> float | None:
        """Returns the busy share of the samples since the last call, None without samples."""
        samples, busy = self._samples, self._busy
        self._samples = self._busy = 0
        return busy / samples if samples else None

    def where(self) -> tuple[bool, str]:
        """Returns whether the main thread is in a collective, and `function (file:line)`."""
        frame = sys._current_frames().get(self._thread_id or 0)
        if frame is None:
            return False, "the main thread is gone"
        return _in_collective(frame), _describe(frame)


def _in_collective(frame: FrameType) -> bool:
    here: FrameType | None = frame
    for _ in range(_DEEPEST):
        if here is None:
            return False
        if here.f_code.co_filename.endswith(_COLLECTIVE_FILES):
            return True
        here = here.f_back
    return False


def _describe(frame: FrameType) -> str:
    """Names the innermost frame that is not part of a collective's own code."""
    here: FrameType | None = frame
    while here is not None and here.f_code.co_filename.endswith(_COLLECTIVE_FILES):
        here = here.f_back
    here = here or frame
    code = here.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{here.f_lineno})"
