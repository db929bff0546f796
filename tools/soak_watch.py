"""What a soak looks at: the events of the job, its processes, and what it leaves behind."""

import ctypes
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")


def adopt_orphans() -> None:
    """Makes descendants whose parent dies children of this process: none gets out of sight."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(spared: set[int]) -> list[psutil.Process]:
    """Returns the living descendants of this process; reaps orphans that have ended.

    Args:
        spared: pids that somebody else here waits for.
    """
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in spared and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
    living = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


class Tail:
    """Reads the lines that were added to a file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields what is new and whole; a line that a killed writer tore is passed over."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


@dataclass(frozen=True)
class Sample:
    """What one process has.

    Attributes:
        recoveries: how many the job had made until then.
        rss_bytes: resident memory.
        descriptors: open file descriptors.
        sockets: how many of them are sockets.
        threads: its threads.
    """

    recoveries: int
    rss_bytes: int
    descriptors: int
    sockets: int
    threads: int

    @classmethod
    def of(cls, pid: int, recoveries: int) -> "Sample":
        """Looks at a process.

        Raises:
            psutil.NoSuchProcess: it is gone.
        """
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(
                recoveries,
                process.memory_info().rss,
                process.num_fds(),
                len(process.net_connections(kind="all")),
                process.num_threads(),
            )


class Growth:
    """Follows processes through the recoveries that they live through."""

    def __init__(self) -> None:
        self._samples: dict[int, list[Sample]] = {}

    def note(self, pid: int, recoveries: int) -> None:
        """Takes a sample; all are to be taken in worlds of one size, while nothing happens."""
        with suppress(psutil.NoSuchProcess):
            self._samples.setdefault(pid, []).append(Sample.of(pid, recoveries))

    def per_recovery(self, field: str, fewest: int) -> float | None:
        """Returns the median over processes of their growth up to their last sample.

        The first third of a process's samples is left out: caches and thread pools fill up then.

        Args:
            field: of Sample.
            fewest: recoveries that a process must have lived through after that to count.
        """
        slopes = [
            (getattr(last, field) - getattr(first, field)) / (last.recoveries - first.recoveries)
            for first, last in self._ends(fewest)
        ]
        return statistics.median(slopes) if slopes else None

    def followed(self, fewest: int) -> int:
        """Returns how many processes lived through that many recoveries."""
        return len(self._ends(fewest))

    def _ends(self, fewest: int) -> list[tuple[Sample, Sample]]:
        ends = ((samples[len(samples) // 3], samples[-1]) for samples in self._samples.values())
        return [(one, two) for one, two in ends if two.recoveries - one.recoveries >= fewest]


class SharedMemory:
    """What came into /dev/shm since, and is used by nobody."""

    def __init__(self) -> None:
        self._before = self._names()
        self._began = time.time()

    def left(self) -> list[str]:
        """Returns the names of new files that no process has mapped or open."""
        used = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
                used |= {
                    line.split("/dev/shm/")[1] for line in maps.splitlines() if "/dev/shm/" in line
                }
                used |= {Path(file.path).name for file in process.open_files()}
        return sorted(self._names() - self._before - used)

    @staticmethod
    def _names() -> set[str]:
        return (
            {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()
        )


def files_under(folder: Path) -> list[str]:
    """Returns the files in a folder, at any depth."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
