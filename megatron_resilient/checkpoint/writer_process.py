"""The process that writes snapshots to storage, so that training neither hashes nor waits.

    python -m megatron_resilient.checkpoint.writer_process PARENT_PID NICE FD...

The descriptors are the memfds of `buffers.Buffers`. Orders come as JSON lines on stdin, answers go
as JSON lines to stdout; `writer.py` is the other end. Files are written under other names; when all
of a job are, each is made durable and renamed, and then their folder is made durable. Storage had
time for the first while the last was written, and commits once for many: on ext4 that takes a
fraction of the time of one after the other. A job that fails leaves none of its files.

It starts without torch and numpy, holds no copy of the data, and ends with its parent, however that
ends. Signals that a job's manager sends to all processes are the parent's business: it decides
whether what is being written is to be finished.
"""

import ctypes
import hashlib
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

from megatron_resilient.checkpoint.data_file import encode_parts
from megatron_resilient.checkpoint.manifest import Stretch

# Ending of a file that is not complete.
TEMPORARY: Final = ".tmp"

_CHUNK_BYTES: Final = 8 << 20
_REPORT_SECONDS: Final = 0.25
_PR_SET_PDEATHSIG: Final = 1
_NO_JOB: Final = -1


class _Orphaned(BaseException):
    """The parent has died; raised in the main thread wherever it is."""


class Answers:
    """Sends to the parent; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, **values: Any) -> None:
        """Sends one message."""
        with self._lock:
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()


class Progress:
    """What is being done, told to the parent several times a second by a thread of its own.

    So the parent can tell a process that is stopped, which says nothing, from one whose storage
    does not answer, which always says the same.
    """

    def __init__(self, answers: Answers, parent: int) -> None:
        self._answers = answers
        self._parent = parent
        self._now: dict[str, Any] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._report, name="progress", daemon=True).start()

    def begin(self, job: int) -> None:
        """A job begins."""
        with self._lock:
            self._now = {"job": job, "bytes": 0, "files": 0, "doing": "", "path": ""}

    def at(self, doing: str, path: str) -> None:
        """Something begins that may take long."""
        with self._lock:
            self._now |= {"doing": doing, "path": path}

    def add(self, size: int, files: int = 0) -> None:
        """So much more is done."""
        with self._lock:
            self._now["bytes"] += size
            self._now["files"] += files

    def end(self, **answer: Any) -> None:
        """The job ends with an answer, after which nothing is said of it any more."""
        with self._lock:
            job, path, self._now = self._now["job"], self._now["path"], {}
            self._answers.send(job=job, path=path, **answer)

    def rest(self) -> None:
        """Nothing is done any more."""
        with self._lock:
            self._now = {}

    def _report(self) -> None:
        while True:
            time.sleep(_REPORT_SECONDS)
            if os.getppid() != self._parent:
                # Where the kernel did not say so; the signal is handled by the main thread.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            with self._lock:
                if not self._now:
                    continue
                try:
                    self._answers.send(progress=self._now)
                except OSError:
                    return  # the parent has gone, which the main thread hears of by itself


def main(arguments: Sequence[str]) -> int:
    """Serves jobs until stdin ends.

    Args:
        arguments: the parent's pid, what to add to the niceness, and the descriptors.
    """
    parent, niceness, *descriptors = (int(argument) for argument in arguments)
    _die_with(parent)
    os.nice(niceness)
    answers = Answers()
    progress = Progress(answers, parent)
    try:
        answers.send(ready=os.getpid())
        for line in sys.stdin:
            order = json.loads(line)
            if "remove" in order:
                progress.begin(_NO_JOB)
                for path in order["remove"]:
                    progress.at("removing", path)
                    _remove([path])
                progress.rest()
            else:
                _do(order, descriptors[order["buffer"]], progress)
    except (_Orphaned, BrokenPipeError):
        # Nobody hears the rest; Python would complain about it at its end.
        os._exit(1)
    return 0


def _do(job: dict[str, Any], descriptor: int, progress: Progress) -> None:
    """Does one job, and answers."""
    begin = time.monotonic()
    progress.begin(job["job"])
    progress.at("opening", job["root"])
    paths = [os.path.join(job["root"], file["path"]) for file in job["files"]]
    partial = [path + TEMPORARY for path in paths]
    try:
        # Mapped for each job, as it may have grown; unmapped with the last view of it.
        memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        files = [
            _write_file(path, file, memory, progress)
            for path, file in zip(partial, job["files"], strict=True)
        ]
        for path in paths:
            _make_durable(path, progress)
        for folder in sorted({os.path.dirname(path) for path in paths}):
            progress.at("syncing", folder)
            _sync_folder(folder)
    except OSError as error:  # told to the parent, which tells all ranks
        _remove(paths + partial)
        progress.end(error=error.strerror or str(error), errno=error.errno)
    except Exception as error:
        _remove(paths + partial)
        progress.end(error=f"{type(error).__name__}: {error}", errno=None)
    except BaseException:
        _remove(paths + partial)
        raise
    else:
        progress.end(files=files, seconds=time.monotonic() - begin)


def _write_file(
    path: str, file: dict[str, Any], memory: memoryview, progress: Progress
) -> dict[str, Any]:
    """Writes one file from a buffer."""
    tensors = [
        (Stretch(key, kind, start, stop), dtype, memory[offset : offset + size])
        for key, kind, start, stop, dtype, offset, size in file["tensors"]
    ]
    parts = encode_parts(tensors, file["path"])
    progress.at("writing", path.removesuffix(TEMPORARY))
    # While this thread waits for the storage, another one hashes: neither holds the GIL.
    digest = _Digest(parts)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            size = 0
            for chunk in _chunks(parts):
                count = 0
                while count < len(chunk):
                    count += os.write(descriptor, chunk[count:])
                # Storage begins at once, so that no fsync takes long, and what has been stored
                # does not push what training needs out of the page cache.
                os.posix_fadvise(descriptor, size, count, os.POSIX_FADV_DONTNEED)
                size += count
                progress.add(count)
        finally:
            os.close(descriptor)
        sha256 = digest.result()
    except BaseException:
        digest.stop()
        raise
    return {"path": file["path"], "bytes": size, "sha256": sha256}


def _make_durable(path: str, progress: Progress) -> None:
    """Gives a file that was written its name; it is durable then, but for its folder."""
    progress.at("syncing", path)
    descriptor = os.open(path + TEMPORARY, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    progress.at("renaming", path)
    os.rename(path + TEMPORARY, path)
    progress.add(0, files=1)


class _Digest:
    """The SHA-256 of a file's parts, counted in a thread."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._sha256: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(parts,), daemon=True)
        self._thread.start()

    def _run(self, parts: Sequence[memoryview]) -> None:
        sha256 = hashlib.sha256()
        for chunk in _chunks(parts):
            if self._stopping:
                return
            sha256.update(chunk)
        self._sha256 = sha256.hexdigest()

    def result(self) -> str:
        """Waits for it."""
        self._thread.join()
        if self._sha256 is None:
            raise RuntimeError("the digest was not counted to its end; see the error above")
        return self._sha256

    def stop(self) -> None:
        """Ends the thread; there is no result."""
        self._stopping = True
        self._thread.join()


def _chunks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _CHUNK_BYTES):
            yield part[start : start + _CHUNK_BYTES]


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(paths: Sequence[str]) -> None:
    """Removes files that nobody will name; what cannot be removed is left to `checkpoint gc`."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                print(f"{path} cannot be removed: {error.strerror}", file=sys.stderr, flush=True)


def _die_with(parent: int) -> None:
    """Ends this process when the parent's thread that started it ends, and ignores other signals.

    By SIGTERM, not SIGKILL, so that no half a file is left.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            raise _Orphaned

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
