"""Copies a rank's state into host memory beside the next forward and backward pass.

Nothing changes parameters or optimizer state between two optimizer steps, so the copy may take
until the next one; then training waits for it (MoC-System, Eq. 10).
"""

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence

import torch

from megatron_resilient.checkpoint.buffers import Buffer, Entry
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.errors import CheckpointError

# By torch's name: safetensors' spelling.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}

Items = Sequence[tuple[Stretch, torch.Tensor]]


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns a tensor's dtype as safetensors spells it.

    Raises:
        CheckpointError: it has no name there.
    """
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise CheckpointError(f"{tensor.dtype} cannot be saved: safetensors lacks it") from None


def contents(items: Items) -> list[tuple[Stretch, str]]:
    """Returns what `Buffers.begin` wants to know of tensors.

    Raises:
        CheckpointError: a dtype that cannot be saved.
    """
    return [(stretch, dtype_name(tensor)) for stretch, tensor in items]


class Snapshot:
    """Takes one snapshot after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._sources: list[torch.Tensor] = []

    def start(self, items: Items, buffer: Buffer) -> None:
        """Begins to copy. The tensors must not change until `wait` has returned.

        Tensors in host memory are copied by a thread, those of a GPU by a stream of their own,
        which first waits for what the current stream was given so far.

        Args:
            items: what was announced to `Buffers.begin`, in the same order.
            buffer: what `begin` returned.
        """
        assert self._thread is None, "the snapshot before was not waited for"
        self._error = None
        self._sources = [tensor.detach() for _, tensor in items]
        try:
            _check(items, buffer.entries)
            pairs = list(zip(buffer.entries, self._sources, strict=True))
            on_host = [pair for pair in pairs if not pair[1].is_cuda]
            on_device = [pair for pair in pairs if pair[1].is_cuda]
            if on_device:
                self._start_on_device(on_device, buffer)
        except Exception as error:  # raised by wait(): training finds all of them in one place
            self._error = error
            return
        if on_host:
            self._thread = threading.Thread(
                target=self._copy_on_host, args=(on_host, buffer), name="snapshot", daemon=True
            )
            self._thread.start()

    def wait(self) -> float:
        """Waits until nothing of the snapshot is in the tensors' memory any more.

        Returns:
            Seconds that this took.

        Raises:
            CheckpointError: it could not be taken; the buffer's content is worth nothing.
            Exception: whatever else went wrong in copying.
        """
        begin = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._event is not None:
            event, self._event = self._event, None
            event.synchronize()
        self._sources = []
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return time.perf_counter() - begin

    def _copy_on_host(self, pairs: Iterable[tuple[Entry, torch.Tensor]], buffer: Buffer) -> None:
        try:
            with torch.no_grad():
                for entry, tensor in pairs:
                    if not tensor.numel():
                        continue
                    target = _in_buffer(entry, buffer)
                    if tensor.is_contiguous():
                        # One thread, without the GIL. torch would take all cores from training, and
                        # its number of threads can only be changed for the whole process.
                        ctypes.memmove(target.data_ptr(), tensor.data_ptr(), entry.bytes)
                    else:
                        target.view(tensor.shape).copy_(tensor)
        except BaseException as error:
            self._error = error

    def _start_on_device(self, pairs: list[tuple[Entry, torch.Tensor]], buffer: Buffer) -> None:
        device = pairs[0][1].device
        _pin(buffer)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for entry, tensor in pairs:
                if tensor.numel():
                    target = _in_buffer(entry, buffer).view(tensor.shape)
                    target.copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._stream)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)


def _check(items: Items, entries: Sequence[Entry]) -> None:
    if len(items) != len(entries):
        raise CheckpointError(f"{len(items)} tensors for a buffer with {len(entries)} entries")
    for (stretch, tensor), entry in zip(items, entries, strict=True):
        if stretch != entry.stretch or dtype_name(tensor) != entry.dtype:
            raise CheckpointError(f"{stretch} ({tensor.dtype}) for an entry of {entry.stretch}")
        if tensor.numel() != stretch.size:
            raise CheckpointError(f"{tensor.numel()} elements for {stretch}")


def _in_buffer(entry: Entry, buffer: Buffer) -> torch.Tensor:
    """Returns a buffer's place for an entry as a flat tensor."""
    assert buffer.memory is not None
    return torch.frombuffer(
        buffer.memory,
        dtype=TORCH_DTYPES[entry.dtype],
        count=entry.stretch.size,
        offset=entry.offset,
    )


def _pin(buffer: Buffer) -> None:
    """Makes the GPU able to write into a buffer while the host does something else.

    What is pinned is taken from the host, so only as much as the buffer holds; it says when that is
    about to change.
    """
    if buffer.before_change is not None or buffer.memory is None:
        return
    runtime = torch.cuda.cudart()
    address = torch.frombuffer(buffer.memory, dtype=torch.uint8).data_ptr()
    failed = int(runtime.cudaHostRegister(address, buffer.held_bytes, 0))
    if failed:
        raise CheckpointError(
            f"{buffer.held_bytes:,} bytes of host memory cannot be pinned (CUDA error {failed}): "
            "is the limit of locked memory (ulimit -l) too low?"
        )

    def unpin() -> None:
        failed = int(runtime.cudaHostUnregister(address))
        if failed:
            raise CheckpointError(f"host memory cannot be unpinned (CUDA error {failed})")

    buffer.before_change = unpin
