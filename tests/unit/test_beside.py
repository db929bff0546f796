"""Functions that run beside the caller: in order, one at a time, and their errors come back."""

import threading
import time

import pytest
import torch

from megatron_resilient.comm.beside import Beside


def test_one_after_the_other_and_beside_the_caller():
    beside, order, free = Beside(torch.device("cpu")), [], threading.Event()

    def first():
        assert free.wait(10)
        order.append(("first", threading.current_thread() is threading.main_thread()))

    beside.start(first)
    order.append("caller")
    free.set()
    beside.start(lambda: order.append("second"))
    assert beside.is_waited_for
    beside.join()
    assert not beside.is_waited_for
    beside.join()
    assert order == ["caller", ("first", False), "second"]


def test_a_failure_comes_back_once():
    beside = Beside(torch.device("cpu"))

    def fail():
        time.sleep(0.01)
        raise ValueError("no link")

    beside.start(fail)
    with pytest.raises(ValueError, match="no link"):
        beside.start(lambda: None)
    beside.join()
    done = []
    beside.start(lambda: done.append(1))
    beside.join()
    assert done == [1]
