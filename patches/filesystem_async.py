"""megatron.core.dist_checkpointing.strategies.filesystem_async: write results without a server.

Stock keeps them in the queue of a multiprocessing Manager: a spawned process per rank that imports
torch and Megatron again, 30 s on two cores before the first save, and that hangs for ever where the
training script has no `if __name__ == "__main__"`.
"""

import os
import queue
from typing import Any

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


class ResultQueue:
    """A queue of the process that made it and of the children that it forks."""

    def __init__(self) -> None:
        import multiprocessing

        self._owner = os.getpid()
        self._local: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._from_children = multiprocessing.get_context("fork").Queue()

    def put(self, item: Any) -> None:
        """Adds an item; from a child it is there when the child has ended."""
        (self._local if os.getpid() == self._owner else self._from_children).put(item)

    def get_nowait(self) -> Any:
        """Returns the oldest item; raises queue.Empty if there is none."""
        try:
            return self._local.get_nowait()
        except queue.Empty:
            return self._from_children.get_nowait()


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
