"""One run at a time writes into a checkpoint directory.

The file D/lock is flock'ed: shared by the processes of the run that holds it, exclusively by its
first process for a moment, and by a collector while no run is there. The kernel releases it when a
process ends, however it ends. Who holds it stands in the file, for the text of errors and because
all processes of one run may hold it together.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.errors import CheckpointError

STARTING: Final = "starting"  # a run that looks for what to restore
RUNNING: Final = "running"
COLLECTING: Final = "collecting"

_NO_LOCKS: Final = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
_TRIES_PAUSE_SECONDS: Final = 0.05
# Who only asks for the holder has the lock for an instant.
_ASKER_WAIT_SECONDS: Final = 1.0
_COLLECTOR_WAIT_SECONDS: Final = 60.0
# An older content is overwritten in place, by as many bytes, so that no reader sees half of two.
_CONTENT_BYTES: Final = 1024


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, or held it last.

    Attributes:
        run: id of the run.
        state: STARTING, RUNNING or COLLECTING.
        host: of the process that took it first.
        pid: of that process.
        since: Unix time in seconds at which it took it.
    """

    run: str
    state: str
    host: str
    pid: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run} (host {self.host}, pid {self.pid}, since {since})"


class RunLock:
    """A process's hold on a checkpoint directory; `begin` or `join` makes one.

    It is not passed on to children: neither to programs that they execute, nor to forks.
    """

    def __init__(self, directory: Path, run: str, descriptor: int):
        self._directory = directory
        self._run = run
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def begin(cls, directory: Path, run: str) -> "RunLock":
        """Takes the directory for a run: its first process does this, before it restores.

        The directory is prepared if need be. If processes of the same run hold it, this joins them.
        A collector that works there is waited for. Until `ready` is called, nobody collects.

        Raises:
            CheckpointError: another run holds it (says who), or the file system has no locks.
        """
        places.prepare(directory)
        descriptor = _open(directory)
        try:
            if not _take(directory, descriptor, run):
                os.close(descriptor)
                descriptor = -1
                return cls.join(directory, run)
            _write(descriptor, run, STARTING, time.time())
            # Going from exclusive to shared is not one step: another run may come in between.
            _share(directory, descriptor, run)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        return cls(directory, run, descriptor)

    @classmethod
    def join(cls, directory: Path, run: str) -> "RunLock":
        """Takes part in the hold of one's own run, after its first process has begun.

        Raises:
            CheckpointError: the directory is another run's, or nobody began.
        """
        descriptor = _open(directory)
        try:
            # Read before it is locked: nobody of a wrong run may hold it, not even for a moment.
            holder = _read(descriptor)
            if holder is None or holder.run != run or holder.state == COLLECTING:
                raise _taken(directory, run, holder)
            _share(directory, descriptor, run)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(directory, run, descriptor)

    def ready(self) -> None:
        """Says that the restore is over, and what it chose adopted: collectors may work again.

        Raises:
            CheckpointError: the file of the lock cannot be written.
        """
        if self._descriptor is None:
            raise CheckpointError(f"{self._directory}: the lock was released")
        before = _read(self._descriptor)
        since = time.time() if before is None else before.since
        _write(self._descriptor, self._run, RUNNING, since)

    def release(self) -> None:
        """Lets go; the last process of the run that does so frees the directory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder(directory: Path) -> Holder | None:
    """Returns who holds a directory now, None if nobody does.

    Raises:
        CheckpointError: the file system has no locks.
    """
    path = directory / places.LOCK
    try:
        # For writing, because some network file systems give exclusive locks only so.
        writable = os.access(path, os.W_OK)
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        if not _flock(directory, descriptor, fcntl.LOCK_EX):
            return _read(descriptor) or Holder("?", RUNNING, "?", 0, 0.0)
        return None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def collecting(directory: Path) -> Iterator[Holder | None]:
    """Keeps runs out while it lasts, if none is there.

    Yields:
        None if runs are kept out, else who holds the directory.

    Raises:
        CheckpointError: the file system has no locks.
    """
    descriptor = _open(directory)
    try:
        if _flock(directory, descriptor, fcntl.LOCK_EX):
            _write(descriptor, "gc", COLLECTING, time.time())
            yield None
        else:
            yield _read(descriptor) or Holder("?", RUNNING, "?", 0, 0.0)
    finally:
        os.close(descriptor)


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked child shares the lock itself: closing it here leaves the parent's in place.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def _take(directory: Path, descriptor: int, run: str) -> bool:
    """Takes the lock exclusively; False if processes of the same run hold it.

    Raises:
        CheckpointError: another run holds it, or a collector does not end.
    """
    began = time.monotonic()
    while not _flock(directory, descriptor, fcntl.LOCK_EX):
        holder = _read(descriptor)
        collected = holder is None or holder.state == COLLECTING
        limit = _COLLECTOR_WAIT_SECONDS if collected else _ASKER_WAIT_SECONDS
        if time.monotonic() - began > limit:
            if holder is not None and holder.run == run and not collected:
                return False
            raise _taken(directory, run, holder)
        time.sleep(_TRIES_PAUSE_SECONDS)
    return True


def _share(directory: Path, descriptor: int, run: str) -> None:
    shared = _flock(directory, descriptor, fcntl.LOCK_SH)
    holder = _read(descriptor)
    if not shared or holder is None or holder.run != run:
        raise _taken(directory, run, holder)


def _open(directory: Path) -> int:
    path = directory / places.LOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


def _flock(directory: Path, descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            raise CheckpointError(
                f"{directory}: its file system has no locks ({error.strerror}), so two runs could "
                "write into it at once: use another folder, or mount it with locks"
            ) from error
        raise CheckpointError(f"{directory / places.LOCK}: {error.strerror}") from error
    return True


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, _CONTENT_BYTES, 0)))
    except (ValueError, TypeError):
        return None  # new, and nobody has begun


def _write(descriptor: int, run: str, state: str, since: float) -> None:
    text = json.dumps(asdict(Holder(run, state, socket.gethostname(), os.getpid(), since)))
    content = text.encode("ascii").ljust(_CONTENT_BYTES - 1) + b"\n"
    if len(content) > _CONTENT_BYTES:
        raise CheckpointError(f"run id of {len(run)} characters: use a shorter one")
    try:
        os.pwrite(descriptor, content, 0)
    except OSError as error:
        raise CheckpointError(f"the lock of the run cannot be written: {error.strerror}") from error


def _taken(directory: Path, run: str, holder: Holder | None) -> CheckpointError:
    if holder is None:
        return CheckpointError(f"{directory}: run {run} has not begun there")
    what = "is being collected" if holder.state == COLLECTING else f"is held by {holder}"
    return CheckpointError(
        f"{directory}: {what}; run {run} cannot write there too: end the other one, or use another "
        "folder"
    )
