"""The training process's side of the writer: hands jobs to it and watches it.

Whatever becomes of the writer's process, every job ends in `Written` or `WriteFailed`, soon after
it happened, and the next job finds a process that works.
"""

import collections
import contextlib
import errno
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_resilient
from megatron_resilient.checkpoint.buffers import Buffer, Entry
from megatron_resilient.checkpoint.writer_process import TEMPORARY
from megatron_resilient.errors import CheckpointError

_PROGRAM = "megatron_resilient.checkpoint.writer_process"
_START_SECONDS = 60.0  # a Python on a network file system that many start at once
_END_SECONDS = 5.0
# Longest time that one look at the process can add to its silence. If this process was stopped, or
# the whole machine, so was perhaps the other one: it gets its time anew.
_LOOK_SECONDS = 0.5
_READ_BYTES = 1 << 16

_ADVICE = {
    errno.ENOSPC: "free some, or let `megatron-resilient checkpoint gc` remove what is not needed",
    errno.EDQUOT: "free some, or let `megatron-resilient checkpoint gc` remove what is not needed",
    errno.EROFS: "is it mounted to be written?",
    errno.EACCES: "may this user write there?",
    errno.EPERM: "may this user write there?",
    errno.ENOENT: "its folder has gone: was it removed, or unmounted?",
    errno.ENOTDIR: "its folder has gone: something else is in its place",
    errno.ESTALE: "its folder has gone: was it removed on the server?",
    errno.EISDIR: "a folder of this name is in the way",
    errno.EFBIG: "the limit of a file's size (ulimit -f) is too low",
    errno.EIO: "the storage is failing",
}


@dataclass(frozen=True)
class FileJob:
    """A file to write.

    Attributes:
        path: relative to the job's root, with slashes; its folder exists.
        entries: of the buffer: the tensors that go in.
    """

    path: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class WriteJob:
    """What one save has to write on this rank.

    Attributes:
        job: a number of the caller's, different for every job; the step, say.
        root: the checkpoint directory.
        buffer: where the tensors are. It must not change until the job has ended.
        files: to write; may be none.
    """

    job: int
    root: Path
    buffer: Buffer
    files: tuple[FileJob, ...]


@dataclass(frozen=True)
class WrittenFile:
    """A file that is durable.

    Attributes:
        path: as in its `FileJob`.
        bytes: its size.
        sha256: of all of it, hexadecimal.
    """

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Written:
    """A job is done: all its files are durable under their names.

    Attributes:
        job: its number.
        files: in the job's order.
        seconds: that it took the writer.
    """

    job: int
    files: tuple[WrittenFile, ...]
    seconds: float


@dataclass(frozen=True)
class WriteFailed:
    """A job has failed; what it had written is being removed.

    Attributes:
        job: its number.
        why: for people: what happened, and what to do.
        path: the file, folder or root that it was at.
        errno: if the operating system refused something.
    """

    job: int
    why: str
    path: str
    errno: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True)
class WriteProgress:
    """How far a job is.

    Attributes:
        job: its number.
        files: that are complete.
        bytes: written of all.
        doing: what the writer is at.
        path: and where.
    """

    job: int
    files: int
    bytes: int
    doing: str
    path: str


Result = Written | WriteFailed


class Writer:
    """Writes jobs one after the other, in a process of its own.

    A daemon thread starts that process and watches it: the kernel ends it with the thread that
    started it, which must therefore last. All methods may be called from any thread.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        *,
        silence_seconds: float = 10.0,
        stall_seconds: float = 120.0,
        niceness: int = 5,
        command: Sequence[str] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            descriptors: of the buffers (`Buffers.descriptors`).
            silence_seconds: the process is killed if it says nothing for so long: it is stopped.
            stall_seconds: or if for so long it does not get on, because storage does not answer.
            niceness: how much less urgent than training its work is, 0 to 19.
            command: the program, to which the arguments are added; for tests.
        """
        self._descriptors = tuple(descriptors)
        self._silence_seconds = silence_seconds
        self._stall_seconds = stall_seconds
        self._niceness = niceness
        self._command = list(command or (sys.executable, "-P", "-m", _PROGRAM))
        self._lock = threading.Condition()
        self._jobs: collections.deque[WriteJob] = collections.deque()  # the first is being done
        self._results: list[Result] = []
        self._progress: WriteProgress | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._worker: _Worker | None = None
        self._leftovers: list[str] = []  # of jobs whose process was killed

    @property
    def pid(self) -> int | None:
        """Process id of the writer, None while there is none."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    @property
    def busy(self) -> bool:
        """Whether there are jobs that have not ended."""
        with self._lock:
            return bool(self._jobs)

    def start(self) -> None:
        """Starts the process; whether that worked is told by the first job."""
        assert self._thread is None, "the writer was started already"
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def write(self, job: WriteJob) -> None:
        """Takes a job; returns at once."""
        with self._lock:
            if self._thread is None or self._closing:
                raise CheckpointError("the writer is closed, or was not started")
            self._jobs.append(job)
        os.eventfd_write(self._wake, 1)

    def poll(self) -> list[Result | WriteProgress]:
        """Returns jobs that ended since the last call, then how far the present one is, if at all.

        Returns at once.
        """
        with self._lock:
            news: list[Result | WriteProgress] = [*self._results]
            self._results = []
            if self._progress is not None:
                news.append(self._progress)
            return news

    def wait(self, timeout_seconds: float | None = None) -> list[Result | WriteProgress]:
        """Waits until a job has ended, none is left, or the time is over; then does as `poll`."""
        with self._lock:
            self._lock.wait_for(lambda: self._results or not self._jobs, timeout_seconds)
        return self.poll()

    def close(self, finish: bool = True) -> list[Result]:
        """Ends the process.

        Args:
            finish: let it do the jobs that it has. A process that stalls is given up as ever, so
                this ends. Otherwise it is killed, and they fail.

        Returns:
            The jobs that ended since the last `poll`.
        """
        if self._thread is not None:
            with self._lock:
                if finish:
                    self._lock.wait_for(lambda: not self._jobs)
                self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self._thread = None
        with self._lock:
            results, self._results = self._results, []
            return results

    # All below runs in the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # else jobs would wait for ever, and nobody know why
            with self._lock:
                self._closing = True
                jobs = list(self._jobs)
            why = f"the writer's thread failed: {type(error).__name__}: {error}"
            for job in jobs:
                self._end(job, WriteFailed(job.job, why, str(job.root)))
            if self._worker is not None:
                self._worker.kill()
                self._worker.bury()
                self._worker = None
            raise

    def _serve(self) -> None:
        self._begin()
        while True:
            with self._lock:
                job = self._jobs[0] if self._jobs else None
                closing = self._closing
            if closing:
                break
            if job is not None:
                if self._worker is None:
                    self._begin()
                if self._worker is None:
                    continue  # that job has failed, perhaps there is another one
                if not self._worker.has_job:
                    self._worker.give(job)
            self._look(job)
        with self._lock:
            unfinished = list(self._jobs)
        for job in unfinished:
            self._leave_behind(job)
            self._end(job, WriteFailed(job.job, "the writer was closed", str(job.root)))
        if self._worker is not None:
            if unfinished:
                self._worker.kill()
            self._worker.end(_END_SECONDS)
            self._worker = None
        self._clear_up()

    def _begin(self) -> None:
        """Starts a process, if it can be; the reason why not becomes the end of a job."""
        try:
            self._worker = _Worker(self._command, self._niceness, self._descriptors)
        except OSError as error:
            with self._lock:
                job = self._jobs[0] if self._jobs else None
            if job is not None:
                why = f"the writer's process cannot be started: {error.strerror}"
                self._end(job, WriteFailed(job.job, why, self._command[0], error.errno))
            return
        if self._leftovers:
            self._worker.order({"remove": self._leftovers})
            self._leftovers = []

    def _look(self, job: WriteJob | None) -> None:
        """Waits for news for a while, and takes them."""
        worker = self._worker
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            if worker is not None:
                selector.register(worker.stdout, selectors.EVENT_READ)
                if worker.outgoing:
                    selector.register(worker.stdin, selectors.EVENT_WRITE)
            begin = time.monotonic()
            idle = worker is None or not worker.has_job
            selector.select(None if idle else _LOOK_SECONDS / 2)
            waited = min(time.monotonic() - begin, _LOOK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if worker is None:
            return
        worker.send_on()
        alive = worker.receive(waited)
        for message in worker.take():
            progress = message.get("progress")
            if progress is not None:
                if job is not None and progress["job"] == job.job:
                    with self._lock:
                        self._progress = WriteProgress(**progress)
            elif job is not None and message.get("job") == job.job:
                self._end(job, _result(message))
                worker.has_job = False
                job = None
        if not alive:
            self._worker = None
            why = f"the writer's process {worker.ended()}"
        elif not worker.has_job:
            return
        elif worker.silent_seconds > (self._silence_seconds if worker.is_ready else _START_SECONDS):
            why = f"the writer's process said nothing for {worker.silent_seconds:.0f} s: killed"
        elif worker.is_ready and worker.stalled_seconds > self._stall_seconds:
            why = f"storage did not answer for {worker.stalled_seconds:.0f} s: the writer is killed"
        else:
            return
        self._worker = None
        worker.kill()
        worker.bury()
        if job is not None and worker.has_job:
            with self._lock:
                path = self._progress.path if self._progress is not None else ""
            self._leave_behind(job)
            self._end(job, WriteFailed(job.job, why, path or str(job.root)))
            self._begin()  # it removes what the other one left

    def _end(self, job: WriteJob, result: Result) -> None:
        with self._lock:
            assert self._jobs[0] is job
            self._jobs.popleft()
            self._progress = None
            self._results.append(result)
            self._lock.notify_all()

    def _leave_behind(self, job: WriteJob) -> None:
        paths = [os.path.abspath(job.root / file.path) for file in job.files]
        self._leftovers += [*paths, *(path + TEMPORARY for path in paths)]

    def _clear_up(self) -> None:
        """Has a last process remove what a killed one left; waits for it, but not for ever."""
        if self._leftovers:
            self._begin()
        if self._worker is not None:
            self._worker.end(_END_SECONDS)
            self._worker = None


@dataclass
class _Worker:
    """One process, and what is known of it."""

    command: list[str]
    niceness: int
    descriptors: tuple[int, ...]
    is_ready: bool = False
    has_job: bool = False
    silent_seconds: float = 0.0
    stalled_seconds: float = 0.0
    outgoing: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        # Not the current folder, but wherever this package was found, installed or not.
        home = str(Path(megatron_resilient.__file__).parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        numbers = (os.getpid(), self.niceness, *self.descriptors)
        self.process = subprocess.Popen(
            [*self.command, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=self.descriptors,
            # What a terminal or a launcher sends to the training process's group is not for it.
            process_group=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self._received = bytearray()
        self._last_progress: Any = None

    def order(self, values: dict[str, Any]) -> None:
        """Sends an order; what the pipe does not take goes with `send_on`."""
        self.outgoing += json.dumps(values).encode() + b"\n"
        self.send_on()

    def give(self, job: WriteJob) -> None:
        """Sends a job."""
        self.has_job = True
        self.silent_seconds = self.stalled_seconds = 0.0
        self.order(
            {
                "job": job.job,
                "root": os.path.abspath(job.root),
                "buffer": job.buffer.number,
                "files": [
                    {
                        "path": file.path,
                        "tensors": [
                            [*entry.stretch, entry.dtype, entry.offset, entry.bytes]
                            for entry in file.entries
                        ],
                    }
                    for file in job.files
                ],
            }
        )

    def send_on(self) -> None:
        """Sends what is still to be sent, as far as the pipe takes it."""
        # A broken pipe is seen, too, as the end of stdout.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.outgoing:
                del self.outgoing[: os.write(self.stdin, self.outgoing)]

    def receive(self, waited_seconds: float) -> bool:
        """Reads what there is; False if the process has closed its end.

        Args:
            waited_seconds: how long it could have said something since the last call.
        """
        try:
            while data := os.read(self.stdout, _READ_BYTES):
                self._received += data
                waited_seconds = 0.0
                self.silent_seconds = 0.0
        except BlockingIOError:
            self.silent_seconds += waited_seconds
            self.stalled_seconds += waited_seconds
            return True
        return False

    def take(self) -> Iterable[dict[str, Any]]:
        """Yields the messages that have come."""
        while (end := self._received.find(b"\n")) >= 0:
            message = json.loads(self._received[:end])
            del self._received[: end + 1]
            self.is_ready = True
            progress = message.get("progress")
            if progress != self._last_progress:
                self._last_progress = progress
                self.stalled_seconds = 0.0
            yield message

    def ended(self) -> str:
        """Says how the process ended; it has closed its stdout."""
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if status == -signal.SIGKILL:
            return "was killed: was memory short?"
        return f"was ended by signal {-status}" if status < 0 else f"exited with {status}"

    def kill(self) -> None:
        """Kills it, and nothing else: its pid is not reused before it was waited for."""
        self.process.kill()

    def bury(self) -> None:
        """Closes the pipes, and waits, but not for one that the kernel cannot end yet."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS / 10)

    def end(self, seconds: float) -> None:
        """Lets it do what it was ordered and end by itself, else kills it."""
        assert self.process.stdin is not None
        until = time.monotonic() + seconds
        while self.outgoing and self.process.poll() is None and time.monotonic() < until:
            select.select([], [self.stdin], [], _LOOK_SECONDS / 2)
            self.send_on()
        self.process.stdin.close()
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self.bury()


def _result(message: dict[str, Any]) -> Result:
    if "error" not in message:
        files = tuple(WrittenFile(**file) for file in message["files"])
        return Written(message["job"], files, message["seconds"])
    advice = _ADVICE.get(message["errno"])
    why = message["error"] if advice is None else f"{message['error']}: {advice}"
    return WriteFailed(message["job"], why, message["path"], message["errno"])
