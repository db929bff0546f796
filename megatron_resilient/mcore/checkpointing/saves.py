"""A save on its way, and what came of it."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_resilient.checkpoint.buffers import Buffer
from megatron_resilient.mcore.checkpointing.recipe import Files, Recipe


@dataclass
class Save:
    """One save on its way.

    Attributes:
        step: after which it was taken.
        begun: clock when it began.
        plain: `Manifest.state`; whole on rank 0 only.
        folder: of its files, relative to the directory; "" until this rank has planned it.
        recipe: who writes what; None until this rank has planned it.
        files: that this rank writes.
        buffer: with the copy; None until it is begun.
        job: number of the worker's job; None until it has one.
        bytes: written by this rank; in the end by all.
        commit: what waits for the worker and, on rank 0, for the manifest; None until it has a job.
        cancelled: set when the commit has to end, because the save is given up.
        failed: why this rank cannot go on with it.
        stall_seconds: how long training waited for it on this rank.
        seconds: from its beginning until its manifest was durable; 0 until rank 0 has written that.
    """

    step: int
    begun: float
    plain: dict[str, Any]
    folder: str = ""
    recipe: Recipe | None = None
    files: Files = ()
    buffer: Buffer | None = None
    job: int | None = None
    bytes: int = 0
    commit: "Future[None] | None" = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    failed: str | None = None
    stall_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """What came of a save.

    Attributes:
        step: after which it was taken.
        failed: why it is not there; None: it is.
        path: of its manifest.
        seconds: from its beginning until it was durable; of a failed one, until that was known.
        stall_seconds: how long this rank's training waited for it.
        bytes: written by all ranks.
    """

    step: int
    failed: str | None
    path: str
    seconds: float
    stall_seconds: float
    bytes: int
