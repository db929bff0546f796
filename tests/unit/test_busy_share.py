"""Stacks of a thread in a collective, and of one that computes."""

import threading

import pytest
import torch.distributed as dist

from megatron_resilient.elastic.busy_share import BusyShare


@pytest.fixture
def in_store_wait(tmp_path, monkeypatch):
    """A thread that waits where a barrier of torch.distributed does."""
    entered, leave = threading.Event(), threading.Event()

    class Work:
        def wait(self):
            entered.set()
            leave.wait(20)

    class Group:
        def barrier(self, opts):
            return Work()

        def _get_backend_name(self):
            return "gloo"

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist.distributed_c10d, "_rank_not_in_group", lambda group: False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Group)
    thread = threading.Thread(target=lambda: dist.barrier())
    thread.start()
    assert entered.wait(20)
    yield thread
    leave.set()
    thread.join()
    monkeypatch.undo()
    dist.destroy_process_group()


def compute(entered, leave):
    entered.set()
    leave.wait(20)


@pytest.fixture
def computing():
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=compute, args=(entered, leave))
    thread.start()
    entered.wait()
    yield thread
    leave.set()
    thread.join()


def test_a_thread_that_computes_is_busy(computing):
    share = BusyShare(computing.ident)
    assert share.take() is None
    for _ in range(3):
        share.sample()
    assert share.take() == 1
    assert share.take() is None
    in_collective, _ = share.where()
    assert not in_collective


def test_a_thread_in_a_collective_is_not(in_store_wait):
    share = BusyShare(in_store_wait.ident)
    share.sample()
    assert share.take() == 0
    in_collective, at = share.where()
    assert in_collective
    assert at


def test_a_thread_that_is_gone():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    share = BusyShare(thread.ident)
    share.sample()
    assert share.take() is None
    assert share.where() == (False, "the main thread is gone")
