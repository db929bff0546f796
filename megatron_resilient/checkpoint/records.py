"""Tells rank 0 what every rank wrote, by small files beside the data.

A collective would have all ranks come to the same place at the same time, and training wait for it.
Here each tells when it is ready, from any thread, and one that never is holds up nobody who is told
to stop waiting. The checkpoint directory is what the ranks share in any case, for as long as they
live: the store of a job may end before.

Records are not part of the format: nobody reads them once the manifest is there, and they are
removed before that.
"""

import contextlib
import os
import threading
from pathlib import Path

from megatron_resilient.errors import CheckpointError

_POLL_SECONDS = 0.01


def write_record(folder: Path, rank: int, data: bytes) -> None:
    """Tells what a rank has to tell of a save; whole or not at all, but not durable.

    Args:
        folder: of the save's data; it exists.
        rank: of this process.
        data: what it tells.

    Raises:
        CheckpointError: it cannot be written; says where.
    """
    path = _path(folder, rank)
    partial = path.with_suffix(".tmp")
    try:
        partial.write_bytes(data)
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error


def take_records(folder: Path, ranks: int, cancelled: threading.Event) -> list[bytes] | None:
    """Waits until all ranks have told, and removes what they wrote.

    Looks for one file every 10 ms. Where the directory is mounted by NFS, a file of another node is
    seen when the mount asks the server again (acdirmin, 30 s if not said otherwise).

    Args:
        folder: of the save's data.
        ranks: how many there are.
        cancelled: ends the waiting.

    Returns:
        What each rank told, by rank; None: cancelled before.

    Raises:
        CheckpointError: a record cannot be read; says where.
    """
    records = []
    for rank in range(ranks):
        path = _path(folder, rank)
        while (record := _read(path)) is None:
            if cancelled.wait(_POLL_SECONDS):
                return None
        records.append(record)
    for rank in range(ranks):
        # Not worth a save: `gc` removes it with the folder.
        with contextlib.suppress(OSError):
            os.unlink(_path(folder, rank))
    return records


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.record"
