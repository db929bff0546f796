"""Waits for a peer that never comes end with the generation; gloo's own timeout is minutes."""

import json
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Work

from megatron_resilient.elastic import fenced_wait, graveyard, sockets
from tests.support.absent_peer import CALLS

ROOT = Path(__file__).parents[2]
REPETITIONS = 20  # as in the command line below


def two_ranks(tmp_path, name):
    path = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.absent_peer", str(rank), path, name, "20"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CALLS)
def test_a_wait_for_an_absent_peer_ends_with_the_generation(tmp_path, name):
    waiting, absent = two_ranks(tmp_path, name)
    assert waiting["out"] == REPETITIONS
    cuts = name in ("send", "recv", "batch", "reduce_scatter")
    assert waiting["errors"] == (["RuntimeError"] if cuts else ["OverError"])
    # One poll and what a busy machine adds, against gloo's half an hour.
    assert waiting["slowest"] < 5
    for rank in (waiting, absent):
        assert rank["retired"]
        assert rank["sockets_left"] == 0
    assert absent["progress"] >= REPETITIONS  # the all-reduces before


@pytest.fixture
def installed():
    yield fenced_wait.install
    fenced_wait.uninstall()


class FakeWork:
    """Is done at the n-th timed wait."""

    def __init__(self, tries, kind=1, error="Operation timed out!"):
        self.tries, self.kind, self.error = tries, kind, error
        self.timeouts = []

    def _get_op_type(self):
        return self.kind

    def wait(self, timeout=timedelta(0)):
        self.timeouts.append(timeout)
        self.tries -= 1
        if self.tries > 0:
            raise RuntimeError(self.error)
        return True


def wait_for(work, check=lambda: None, **options):
    progress = []
    waiting = fenced_wait._polling(FakeWork.wait, check, lambda: progress.append(1))
    return waiting(work, **options), len(progress)


def test_a_wait_that_is_done_at_once_is_not_polled():
    work = FakeWork(tries=1)
    assert wait_for(work, check=lambda: 1 / 0) == (True, 1)
    assert len(work.timeouts) == 1


def test_expired_waits_go_on_until_it_is_done():
    checks = []
    assert wait_for(FakeWork(tries=4), check=lambda: checks.append(1)) == (True, 1)
    assert len(checks) == 3


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="Connection reset"):
        wait_for(FakeWork(tries=2, error="Connection reset by peer"))


@pytest.mark.parametrize("kind", [12, 13, 14, 100])
def test_point_to_point_is_waited_for_without_a_timeout(kind):
    work = FakeWork(tries=1, kind=kind)
    wait_for(work)
    assert work.timeouts == [timedelta(0)]


def test_a_callers_own_timeout_is_kept():
    work = FakeWork(tries=1)
    wait_for(work, timeout=timedelta(seconds=7))
    assert work.timeouts == [timedelta(seconds=7)]


def test_install_twice_and_uninstall(installed):
    before = Work.wait
    installed(lambda: None)
    installed(lambda: None)
    assert Work.wait is not before
    fenced_wait.uninstall()
    assert Work.wait is before
    fenced_wait.uninstall()
    assert Work.wait is before


def test_collectives_that_go_through_are_never_polled(installed, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        values = torch.ones(1)
        installed(lambda: 1 / 0)
        for _ in range(100):
            torch.distributed.all_reduce(values)
    finally:
        torch.distributed.destroy_process_group()


def test_retire_waits_no_longer_than_it_is_told():
    never = threading.Event()
    assert not graveyard.retire(never.wait, wait_seconds=0.05)
    never.set()
    assert graveyard.retire(lambda: None)
    with pytest.raises(ZeroDivisionError):
        graveyard.retire(lambda: 1 / 0)


def test_sockets_are_cut_but_those_spared_and_those_that_listen():
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as spared,
        server.accept()[0] as spared_peer,
    ):
        before = sockets.tcp_inodes()
        with (
            socket.create_connection(server.getsockname()) as cut,
            server.accept()[0] as peer,
        ):
            assert len(sockets.tcp_inodes() - before) == 2
            woken = threading.Thread(target=peer.recv, args=(1,))
            woken.start()
            time.sleep(0.05)
            assert sockets.cut_sockets(before) == 2
            woken.join(10)
            assert not woken.is_alive()
            assert cut.recv(1) == b""
        spared.sendall(b"x")
        assert spared_peer.recv(1) == b"x"
        with socket.create_connection(server.getsockname()) as late:
            server.accept()[0].close()
            assert late.recv(1) == b""
