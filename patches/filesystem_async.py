"""megatron.core.dist_checkpointing.strategies.filesystem_async: write results without a server.

Stock keeps them in the queue of a multiprocessing Manager: a spawned process per rank that imports
torch and Megatron again, 30 s on two cores before the first save, and that hangs for ever where the
training script has no `if __name__ == "__main__"`.
"""

import os
import pickle
import queue
from typing import Any

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


class ResultQueue:
    """A queue of the process that made it and of the children that it forks.

    What children put goes through a file without a name, not through a pipe: a pipe holds 64 KiB,
    and a child with more to say would wait at its end for a reader that waits for that end.
    """

    def __init__(self) -> None:
        import multiprocessing
        import tempfile

        self._owner = os.getpid()
        self._local: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = multiprocessing.get_context("fork").Lock()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the queue
        self._read_bytes = 0

    def put(self, item: Any) -> None:
        """Adds an item; from a child it is there when this returns."""
        if os.getpid() == self._owner:
            self._local.put(item)
            return
        with self._lock:
            self._file.seek(0, os.SEEK_END)
            pickle.dump(item, self._file)
            self._file.flush()

    def get_nowait(self) -> Any:
        """Returns the oldest item; raises queue.Empty if there is none."""
        try:
            return self._local.get_nowait()
        except queue.Empty:
            return self._from_children()

    def close(self) -> None:
        """Closes the file; what was not read is lost."""
        self._file.close()

    def _from_children(self) -> Any:
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            if end == self._read_bytes:
                raise queue.Empty
            self._file.seek(self._read_bytes)
            item = pickle.load(self._file)
            self._read_bytes = self._file.tell()
            if self._read_bytes == end:
                self._file.truncate(0)
                self._read_bytes = 0
            return item


def _get_write_results_queue(original):
    queues: list[ResultQueue] = []

    def get_write_results_queue(mp_mode="spawn"):
        if not queues:
            queues.append(ResultQueue())
        return queues[0]

    return get_write_results_queue


PATCHES = (
    Patch(
        id="cpu.write-results-queue",
        group="cpu",
        target="megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "get_write_results_queue",
        kind="replace",
        make=_get_write_results_queue,
        reason="A spawned Manager re-imports torch and Megatron on every rank (30 s on two cores).",
        no_seam="The writer calls it without arguments.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=(),
        removable_when="The results come back without a Manager.",
    ),
)
