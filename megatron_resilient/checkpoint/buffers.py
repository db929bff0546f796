"""Host memory for snapshots: three buffers that the writer's process sees too (MoC-System, 5.1).

A buffer goes free -> filling -> full -> persisting -> recovery -> free. While one is written, the
next snapshot can be taken, and the newest one that is durable stays in memory for a recovery.

The memory is anonymous (memfd): it has no name that could be left behind in /dev/shm or /tmp, and
the kernel takes it back when the last process that has it ends, however it ends.
"""

import enum
import mmap
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.errors import HostMemoryError

# Tensors start where any element type, and a copy by vector instructions, is at home.
_ALIGNMENT_BYTES = 64


class State(enum.Enum):
    """What a buffer is for at the moment."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    PERSISTING = "persisting"
    RECOVERY = "recovery"


class Entry(NamedTuple):
    """Where a stretch is in a buffer.

    Attributes:
        stretch: which.
        dtype: of its elements, as safetensors spells it.
        offset: of its first byte.
    """

    stretch: Stretch
    dtype: str
    offset: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.stretch.size * ELEMENT_BYTES[self.dtype]


class Buffer:
    """One of the three; `Buffers` changes it, others read.

    Attributes:
        number: its place among them, also in the writer's process.
        fd: the memfd.
        state: what it is for.
        step: training step whose state it has; of no meaning while it is free.
        entries: what is where.
        memory: the mapping; another object after the buffer grew. Never close it: tensors of torch
            may lie in it, and it ends with the last of them.
        held_bytes: of the host's memory that it takes: the most that it needed so far.
        before_change: called before memory is given back or mapped anew; for whoever has told a
            device of it. Set to None after the call.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.fd = os.memfd_create(f"snapshot-{number}")
        self.state = State.FREE
        self.step = -1
        self.entries: tuple[Entry, ...] = ()
        self.memory: mmap.mmap | None = None
        self.held_bytes = 0
        self.before_change: Callable[[], None] | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes up to the end of the last entry."""
        return self.entries[-1].offset + self.entries[-1].bytes if self.entries else 0

    def view(self, entry: Entry) -> memoryview:
        """Returns the bytes of an entry; they are others once the buffer is free again."""
        assert self.memory is not None
        return memoryview(self.memory)[entry.offset : entry.offset + entry.bytes]

    def resize(self, size: int) -> None:
        """Makes room for so many bytes; what is there stays and is not copied."""
        if size <= self.held_bytes:
            return
        self._announce()
        if self.memory is None or len(self.memory) < size:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
        self.held_bytes = size

    def trim(self, size: int) -> None:
        """Gives memory beyond so many bytes back to the host; the mapping stays valid."""
        if self.memory is None or self.held_bytes <= size:
            return
        self._announce()
        self.memory.madvise(mmap.MADV_REMOVE, size, len(self.memory) - size)
        self.held_bytes = size

    def _announce(self) -> None:
        if self.before_change is not None:
            self.before_change()
            self.before_change = None


class Buffers:
    """All of them, and the bound that they keep together.

    For one thread. A buffer in another state than a call wants is a mistake of the caller's.
    """

    def __init__(self, bound_bytes: int, count: int = 3) -> None:
        """Takes no memory yet.

        Args:
            bound_bytes: what all buffers together may hold at any time.
            count: of buffers.
        """
        self.bound_bytes = bound_bytes
        self.buffers = tuple(Buffer(number) for number in range(count))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The memfds, in the order of the buffers; for `Writer`."""
        return tuple(buffer.fd for buffer in self.buffers)

    @property
    def held_bytes(self) -> int:
        """Bytes of the host's memory that all hold."""
        return sum(buffer.held_bytes for buffer in self.buffers)

    @property
    def recovery(self) -> Buffer | None:
        """The newest durable snapshot that is still in memory."""
        return self._first(State.RECOVERY)

    def begin(self, step: int, contents: Iterable[tuple[Stretch, str]]) -> Buffer | None:
        """Lays out a snapshot in a free buffer, which is filling from then on.

        Where the bound leaves no room otherwise, free buffers give their memory back, and then the
        recovery buffer is given up.

        Args:
            step: training step whose state it will have.
            contents: (stretch, dtype) of all that is to go in.

        Returns:
            The buffer; None if others are in use and leave no room: skip this snapshot, wait for
            the writer, or `release` the full one.

        Raises:
            HostMemoryError: it would not fit if all others were empty.
        """
        entries, size = [], 0
        for stretch, dtype in contents:
            entries.append(Entry(stretch, dtype, size))
            size += -(-entries[-1].bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE  # nothing cannot be mapped
        if size > self.bound_bytes:
            raise HostMemoryError(
                f"the snapshot of step {step} needs {size:,} bytes of host memory on this rank, "
                f"but {self.bound_bytes:,} are allowed: allow more, or let it have fewer experts"
            )
        busy = sum(b.held_bytes for b in self.buffers if b.state is not State.FREE)
        recovery = self.recovery
        if recovery is not None and 0 < busy + size - self.bound_bytes <= recovery.held_bytes:
            self.release(recovery)
            busy -= recovery.held_bytes
        free = [buffer for buffer in self.buffers if buffer.state is State.FREE]
        if not free or size > self.bound_bytes - busy:
            return None
        # The least that is large enough, else the largest: memory that is there is not faulted in.
        buffer = min(
            free,
            key=lambda b: (b.held_bytes < size, abs(b.held_bytes - size), b.number),
        )
        for other in free:
            excess = busy + max(size, buffer.held_bytes) - self.bound_bytes
            excess += sum(b.held_bytes for b in free if b is not buffer)
            if excess > 0 and other is not buffer:
                other.trim(0)
        if busy + max(size, buffer.held_bytes) > self.bound_bytes:
            buffer.trim(size)
        buffer.resize(size)
        buffer.state, buffer.step, buffer.entries = State.FILLING, step, tuple(entries)
        return buffer

    def filled(self, buffer: Buffer) -> None:
        """Notes that a snapshot is complete."""
        _change(buffer, State.FILLING, State.FULL)

    def next_to_persist(self) -> Buffer | None:
        """Returns the oldest full buffer, which is persisting now; None while another one is."""
        full = [buffer for buffer in self.buffers if buffer.state is State.FULL]
        if not full or self._first(State.PERSISTING) is not None:
            return None
        oldest = min(full, key=lambda buffer: (buffer.step, buffer.number))
        oldest.state = State.PERSISTING
        return oldest

    def persisted(self, buffer: Buffer) -> None:
        """Notes that a save is durable: a recovery from memory takes it, and no more the old one.

        Not before the manifest is durable: until then the old one is the newest whole state.
        """
        old = self.recovery
        _change(buffer, State.PERSISTING, State.RECOVERY)
        if old is not None:
            self.release(old)

    def release(self, buffer: Buffer) -> None:
        """Frees a buffer whatever it was for; its memory stays for the next snapshot.

        After a write that failed, only when the writer has reported that.
        """
        buffer.state, buffer.step, buffer.entries = State.FREE, -1, ()

    def close(self) -> None:
        """Gives all memory back. Tensors that lie in it must not be used any more."""
        for buffer in self.buffers:
            self.release(buffer)
            buffer.trim(0)
            buffer.memory = None
            os.close(buffer.fd)

    def _first(self, state: State) -> Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.state is state), None)


def _change(buffer: Buffer, old: State, new: State) -> None:
    assert buffer.state is old, f"buffer {buffer.number} is {buffer.state.value}, not {old.value}"
    buffer.state = new
