"""Copies of tensors in host buffers."""

import gc
import threading

import pytest
import torch

from megatron_resilient.checkpoint import snapshot as module
from megatron_resilient.checkpoint.buffers import Buffers
from megatron_resilient.checkpoint.dtypes import ELEMENT_BYTES
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.checkpoint.snapshot import Snapshot, contents, dtype_name
from megatron_resilient.errors import CheckpointError


@pytest.fixture
def buffers():
    own = Buffers(1 << 24)
    yield own
    own.close()


def items_of(*tensors):
    return [
        (Stretch(f"dense/0.0/0/{i}", "main", 0, each.numel()), each)
        for i, each in enumerate(tensors)
    ]


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def taken(buffers, items):
    buffer = buffers.begin(1, contents(items))
    snapshot = Snapshot()
    snapshot.start(items, buffer)
    assert snapshot.wait() >= 0
    return [bytes(buffer.view(entry)) for entry in buffer.entries]


def test_every_dtype_of_ours_is_copied_bit_by_bit(buffers):
    tensors = [
        torch.randint(0, 256, (3 * 8,), dtype=torch.uint8).view(dtype)
        for dtype in module._DTYPES
        if dtype is not torch.bool
    ]
    tensors.append(torch.tensor([True, False, True]))
    assert taken(buffers, items_of(*tensors)) == [raw(tensor) for tensor in tensors]


def test_names_and_sizes_are_those_of_safetensors():
    for dtype, name in module._DTYPES.items():
        assert dtype.itemsize == ELEMENT_BYTES[name]


def test_parameters_views_gaps_and_nothing(buffers):
    base = torch.arange(24.0)
    tensors = [
        torch.nn.Parameter(torch.randn(3, 4)),
        base[5:9],
        base.view(4, 6).t(),
        base[::3],
        torch.empty(0),
        torch.tensor(3.0),
    ]
    assert taken(buffers, items_of(*tensors)) == [raw(tensor) for tensor in tensors]


def test_what_was_waited_for_no_longer_changes_with_the_tensors(buffers):
    source = torch.zeros(1000)
    items = items_of(source)
    buffer = buffers.begin(1, contents(items))
    snapshot = Snapshot()
    snapshot.start(items, buffer)
    snapshot.wait()
    source += 1
    assert bytes(buffer.view(buffer.entries[0])) == bytes(4000)


def test_a_waited_snapshot_holds_no_tensor(buffers):
    source = torch.zeros(1000)
    items = items_of(source)
    buffer = buffers.begin(1, contents(items))
    snapshot = Snapshot()
    snapshot.start(items, buffer)
    snapshot.wait()
    assert snapshot._sources == []
    assert not [thread for thread in threading.enumerate() if thread.name == "snapshot"]


def test_one_snapshot_after_the_other_in_a_buffer_that_grows(buffers):
    snapshot = Snapshot()
    for step, size in enumerate((10, 100_000, 1000)):
        items = items_of(torch.full((size,), float(step)))
        buffer = buffers.begin(step, contents(items))
        assert buffer.number == 0
        snapshot.start(items, buffer)
        snapshot.wait()
        assert bytes(buffer.view(buffer.entries[0])) == raw(items[0][1])
        buffers.release(buffer)


def test_a_tensor_in_a_buffer_outlives_its_mapping(buffers):
    items = items_of(torch.ones(10))
    buffer = buffers.begin(1, contents(items))
    snapshot = Snapshot()
    snapshot.start(items, buffer)
    snapshot.wait()
    inside = module._in_buffer(buffer.entries[0], buffer)
    buffers.release(buffer)
    buffer.resize(1 << 20)
    gc.collect()
    assert inside.sum() == 10


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.ones(3), "elements"),
        (torch.ones(4, dtype=torch.float64), "for an entry"),
        (None, "1 entries"),
    ],
)
def test_other_tensors_than_announced_are_an_error_of_wait(buffers, other, says):
    items = items_of(torch.ones(4))
    buffer = buffers.begin(1, contents(items))
    snapshot = Snapshot()
    wrong = [] if other is None else [(items[0][0], other)]
    snapshot.start(wrong, buffer)
    with pytest.raises(CheckpointError, match=says):
        snapshot.wait()
    snapshot.start(items, buffer)  # the error is told once
    snapshot.wait()


def test_an_error_of_the_copying_thread_is_raised_by_wait(buffers, monkeypatch):
    items = items_of(torch.ones(4))
    buffer = buffers.begin(1, contents(items))

    def fails(*_):
        raise ValueError("no copy")

    monkeypatch.setattr(module.ctypes, "memmove", fails)
    snapshot = Snapshot()
    snapshot.start(items, buffer)
    with pytest.raises(ValueError, match="no copy"):
        snapshot.wait()


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(CheckpointError, match="complex64 cannot be saved"):
        dtype_name(torch.zeros(1, dtype=torch.complex64))


class Runtime:
    """Stands for the CUDA runtime: what is pinned at the moment, by address."""

    def __init__(self):
        self.pinned = {}
        self.fails = 0

    def cudaHostRegister(self, address, size, flags):
        assert (address not in self.pinned, flags) == (True, 0)
        if not self.fails:
            self.pinned[address] = size
        return self.fails

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


def test_what_a_buffer_holds_is_pinned_once_and_unpinned_before_that_changes(buffers, monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for size, held in ((4096, 4096), (100, 4096), (8192, 8192)):
        buffer = buffers.begin(1, [(Stretch("dense/0.0/0/w", "main", 0, size), "U8")])
        module._pin(buffer)
        module._pin(buffer)
        inside = module._in_buffer(buffer.entries[0], buffer)
        assert runtime.pinned == {inside.data_ptr(): held}
        buffers.release(buffer)
    buffer.trim(4096)
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned_is_a_clear_error(buffers, monkeypatch):
    runtime = Runtime()
    runtime.fails = 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = buffers.begin(1, [(Stretch("dense/0.0/0/w", "main", 0, 10), "U8")])
    with pytest.raises(CheckpointError, match=r"cannot be pinned \(CUDA error 2\)"):
        module._pin(buffer)
