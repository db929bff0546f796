"""What a restore takes from this rank's own memory."""

import mmap

import pytest
import torch

from megatron_resilient.checkpoint.buffers import Buffers
from megatron_resilient.checkpoint.manifest import ArrayInfo, Stretch
from megatron_resilient.mcore.checkpointing.memory import InMemory, whole_experts

KINDS = {"main": "F32", "exp_avg": "F32"}
ARRAYS = {
    "expert/1/0/0/fc1": ArrayInfo((4,), KINDS),
    "expert/1/0/0/fc2": ArrayInfo((2, 3), KINDS),
    "expert/2/5/0/fc1": ArrayInfo((4,), KINDS),
    "dense/0.0/0/w": ArrayInfo((8,), {"main": "F32"}),
}


def all_of(*keys):
    return [Stretch(key, kind, 0, ARRAYS[key].size) for key in keys for kind in ARRAYS[key].kinds]


FIRST = all_of("expert/1/0/0/fc1", "expert/1/0/0/fc2")


def test_an_expert_is_whole_when_nothing_of_it_is_missing():
    assert whole_experts(FIRST, ARRAYS) == {(1, 0)}
    assert whole_experts([*FIRST, *all_of("expert/2/5/0/fc1")], ARRAYS) == {(1, 0), (2, 5)}
    assert whole_experts([], ARRAYS) == set()
    assert whole_experts(all_of("dense/0.0/0/w"), ARRAYS) == set()


@pytest.mark.parametrize("missing", range(len(FIRST)))
def test_an_expert_that_lacks_an_array_or_a_part_of_one_is_not_whole(missing):
    others = FIRST[:missing] + FIRST[missing + 1 :]
    assert whole_experts(others, ARRAYS) == set()
    key, kind, start, stop = FIRST[missing]
    assert whole_experts([*others, Stretch(key, kind, start, stop - 1)], ARRAYS) == set()
    halves = [Stretch(key, kind, 0, 1), Stretch(key, kind, 1, stop)]
    assert whole_experts([*others, *halves], ARRAYS) == {(1, 0)}


@pytest.fixture
def buffers():
    own = Buffers(10 * mmap.PAGESIZE)
    yield own
    own.close()


def saved(buffers, step, files, beside=()):
    """A durable save of some stretches, whose values count from 0."""
    stretches = [each for own in files.values() for each in own] + list(beside)
    buffer = buffers.begin(step, [(each, "F32") for each in stretches])
    for entry in buffer.entries:
        values = torch.arange(entry.stretch.size, dtype=torch.float32)
        buffer.view(entry)[:] = values.numpy().tobytes()
    buffers.filled(buffer)
    assert buffers.next_to_persist() is buffer
    buffers.persisted(buffer)
    return InMemory(buffer, step, files)


def test_what_was_written_and_what_only_a_snapshot_has(buffers):
    written, beside = all_of("expert/1/0/0/fc1"), all_of("expert/2/5/0/fc1")
    memory = saved(buffers, 3, {"file": tuple(written)}, beside)
    assert memory.is_there
    assert memory.beside() == beside
    found = memory.tensors(written[:1])
    assert found.keys() == set(written[:1])
    assert torch.equal(found[written[0]], torch.arange(4, dtype=torch.float32))
    found[written[0]].zero_()  # a copy: the buffer keeps what it has
    assert torch.equal(memory.tensors(written)[written[0]], torch.arange(4, dtype=torch.float32))


def test_a_buffer_that_others_got_is_not_there(buffers):
    first = saved(buffers, 3, {"file": tuple(all_of("expert/1/0/0/fc1"))})
    second = saved(buffers, 4, {"file": tuple(all_of("expert/1/0/0/fc1"))})
    assert not first.is_there
    assert second.is_there
