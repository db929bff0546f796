"""Host buffers: states, contents and the bound."""

import mmap
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megatron_resilient.checkpoint.buffers import Buffers, State
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.errors import HostMemoryError

PAGE = mmap.PAGESIZE


def contents(size, key="dense/0.0/0/w"):
    """One stretch of so many bytes, and one of a few others."""
    return [(Stretch(key, "main", 0, size), "U8")]


def resident(buffer):
    """Bytes of memory that the kernel says a buffer has."""
    return os.fstat(buffer.fd).st_blocks * 512


@pytest.fixture
def buffers():
    own = Buffers(10 * PAGE)
    yield own
    own.close()


def whole_round(buffers, step, size=PAGE):
    buffer = buffers.begin(step, contents(size))
    buffers.filled(buffer)
    assert buffers.next_to_persist() is buffer
    buffers.persisted(buffer)
    return buffer


def test_the_states_of_a_save(buffers):
    first = buffers.begin(1, contents(PAGE))
    assert first.state is State.FILLING
    assert buffers.next_to_persist() is None
    buffers.filled(first)
    assert first.state is State.FULL
    assert buffers.next_to_persist() is first
    second = buffers.begin(2, contents(PAGE))
    buffers.filled(second)
    assert buffers.next_to_persist() is None  # one at a time
    buffers.persisted(first)
    assert buffers.recovery is first
    assert buffers.next_to_persist() is second
    third = buffers.begin(3, contents(PAGE))
    assert {first, second, third} == set(buffers.buffers)
    assert buffers.begin(4, contents(PAGE)) is None
    buffers.persisted(second)
    assert buffers.recovery is second
    assert first.state is State.FREE
    assert buffers.begin(4, contents(PAGE)) is first


def test_the_oldest_full_buffer_is_persisted_first(buffers):
    second, first = buffers.begin(2, contents(1)), buffers.begin(1, contents(1))
    buffers.filled(second)
    buffers.filled(first)
    assert buffers.next_to_persist() is first


def test_a_failed_write_frees_and_the_old_recovery_buffer_stays(buffers):
    old = whole_round(buffers, 1)
    failed = buffers.begin(2, contents(PAGE))
    buffers.filled(failed)
    buffers.next_to_persist()
    buffers.release(failed)
    assert buffers.recovery is old
    assert (old.step, failed.state) == (1, State.FREE)


def test_a_call_in_the_wrong_state_is_refused(buffers):
    buffer = buffers.begin(1, contents(1))
    with pytest.raises(AssertionError, match="is filling, not persisting"):
        buffers.persisted(buffer)


def test_entries_are_aligned_and_do_not_overlap(buffers):
    stretches = [
        (Stretch("a", "main", 5, 8), "F32"),
        (Stretch("a", "value", 0, 1), "U8"),
        (Stretch("b", "main", 0, 33), "BF16"),
        (Stretch("c", "main", 2, 2), "F64"),
        (Stretch("d", "main", 2, 9), "I64"),
    ]
    buffer = buffers.begin(7, stretches)
    assert [(entry.stretch, entry.dtype) for entry in buffer.entries] == stretches
    assert [entry.bytes for entry in buffer.entries] == [12, 1, 66, 0, 56]
    for number, entry in enumerate(buffer.entries):
        assert entry.offset % 64 == 0
        buffer.view(entry)[:] = bytes([number + 1]) * entry.bytes
    for number, entry in enumerate(buffer.entries):
        assert bytes(buffer.view(entry)) == bytes([number + 1]) * entry.bytes
    assert buffer.step == 7


def test_an_empty_snapshot_is_one(buffers):
    buffer = buffers.begin(1, [])
    assert buffer.used_bytes == 0
    buffers.filled(buffer)


def test_too_large_for_the_bound_is_a_named_error(buffers):
    with pytest.raises(HostMemoryError, match=r"step 3 needs 45,056 bytes .* 40,960 are allowed"):
        buffers.begin(3, contents(10 * PAGE + 1))
    assert all(buffer.state is State.FREE for buffer in buffers.buffers)
    assert buffers.begin(3, contents(10 * PAGE)) is not None


def test_growing_keeps_what_old_views_see(buffers):
    buffer = buffers.begin(1, contents(PAGE))
    view = buffer.view(buffer.entries[0])
    view[:] = b"x" * PAGE
    buffers.release(buffer)
    assert buffers.begin(2, contents(5 * PAGE)) is buffer
    assert bytes(view) == b"x" * PAGE
    assert bytes(buffer.view(buffer.entries[0])[:PAGE]) == b"x" * PAGE
    assert resident(buffer) == PAGE  # the rest is taken when it is used


def test_memory_of_free_buffers_is_given_back_for_another(buffers):
    small = buffers.begin(1, contents(4 * PAGE))
    small.view(small.entries[0])[:] = b"x" * 4 * PAGE
    other = buffers.begin(2, contents(PAGE))
    buffers.release(small)
    large = buffers.begin(3, contents(9 * PAGE))
    large.view(large.entries[0])[:] = b"x" * 9 * PAGE
    assert sum(map(resident, buffers.buffers)) <= buffers.bound_bytes
    assert buffers.held_bytes == 10 * PAGE
    assert other.state is State.FILLING


def test_the_recovery_buffer_is_given_up_only_where_the_bound_leaves_no_room(buffers):
    whole_round(buffers, 1, 5 * PAGE)
    second = buffers.begin(2, contents(5 * PAGE))
    assert buffers.recovery is not None
    assert buffers.begin(3, contents(6 * PAGE)) is None
    assert buffers.recovery is not None
    buffers.filled(second)
    assert buffers.begin(3, contents(5 * PAGE)) is not None
    assert buffers.recovery is None


def test_whoever_pinned_memory_hears_of_every_change_before_it(buffers):
    heard = []
    buffer = buffers.begin(1, contents(2 * PAGE))
    buffer.before_change = lambda: heard.append(buffer.held_bytes)
    buffers.release(buffer)
    assert buffers.begin(2, contents(PAGE)) is buffer
    assert heard == []
    buffers.release(buffer)
    assert buffers.begin(3, contents(4 * PAGE)) is buffer
    assert heard == [2 * PAGE]
    assert buffer.before_change is None
    buffer.before_change = lambda: heard.append(buffer.held_bytes)
    buffers.release(buffer)
    buffer.trim(PAGE)
    buffer.before_change = lambda: heard.append(buffer.held_bytes)
    buffer.resize(3 * PAGE)  # the mapping is long enough, but more of it is in use
    assert heard == [2 * PAGE, 4 * PAGE, PAGE]


def test_nothing_has_a_name_and_closing_gives_all_back():
    before = set(os.listdir("/proc/self/fd"))
    names = set(os.listdir("/dev/shm"))
    own = Buffers(10 * PAGE)
    whole_round(own, 1)
    assert set(os.listdir("/dev/shm")) == names
    own.close()
    assert set(os.listdir("/proc/self/fd")) == before


class AnyOrder(RuleBasedStateMachine):
    """Saves of any sizes in any order: the bound is kept, and so is what buffers hold."""

    def __init__(self):
        super().__init__()
        self.buffers = Buffers(8 * PAGE)
        self.step = 0
        self.marks = {}

    @rule(size=st.integers(0, 9 * PAGE))
    def begin(self, size):
        self.step += 1
        used = [b for b in self.buffers.buffers if b.state not in (State.FREE, State.RECOVERY)]
        try:
            buffer = self.buffers.begin(self.step, contents(size))
        except HostMemoryError:
            assert size > 8 * PAGE
            return
        if buffer is None:
            assert used or self.buffers.recovery
            return
        assert buffer not in used
        buffer.view(buffer.entries[0])[:] = bytes([self.step % 256]) * size
        self.marks[buffer] = bytes([self.step % 256]) * size

    @rule(number=st.integers(0, 2), fail=st.booleans())
    def go_on(self, number, fail):
        buffer = self.buffers.buffers[number]
        if fail:
            self.buffers.release(buffer)
        elif buffer.state is State.FILLING:
            self.buffers.filled(buffer)
        elif buffer.state is State.FULL:
            self.buffers.next_to_persist()
        elif buffer.state is State.PERSISTING:
            self.buffers.persisted(buffer)

    @invariant()
    def the_bound_is_kept(self):
        assert sum(map(resident, self.buffers.buffers)) <= self.buffers.held_bytes <= 8 * PAGE

    @invariant()
    def contents_stay_while_they_are_needed(self):
        for buffer in self.buffers.buffers:
            if buffer.state is not State.FREE:
                assert bytes(buffer.view(buffer.entries[0])) == self.marks[buffer]

    @invariant()
    def one_of_a_kind(self):
        states = [buffer.state for buffer in self.buffers.buffers]
        assert states.count(State.PERSISTING) <= 1
        assert states.count(State.RECOVERY) <= 1

    def teardown(self):
        self.buffers.close()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
