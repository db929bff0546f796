"""A gloo group whose peer never comes: whoever makes it is out when the generation ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

PROGRAM = """
import sys, threading, time
import torch.distributed as dist
from megatron_resilient.elastic import fenced_groups

class Fenced(Exception):
    pass

fence = threading.Event()

def check():
    if fence.is_set():
        raise Fenced

fenced_groups.install(check)
rank, world, store_port, dies = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", store_port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
dist.barrier()
if dies and rank == world - 1:
    time.sleep(600)  # it never comes to make the next group
if dies:
    threading.Timer(1.0, fence.set).start()
begin = time.monotonic()
try:
    dist.new_group(list(range(world)))
except Fenced:
    print("fenced", round(time.monotonic() - begin, 1), flush=True)
else:
    print("made", flush=True)
import os
os._exit(0)
"""


def outcomes(world, dies):
    from tests.support.pretrain_pool import free_port

    port = free_port()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, (rank, world, port, dies))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        waiting = processes[:-1] if dies else processes
        return [process.communicate(timeout=90)[0].split() for process in waiting]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_groups_are_made_as_ever():
    assert outcomes(3, dies=0) == [["made"]] * 3


def test_a_peer_that_never_comes_holds_nobody():
    begin = time.monotonic()
    for word, seconds in outcomes(3, dies=1):
        assert word == "fenced"
        assert float(seconds) < 5
    assert time.monotonic() - begin < 90
