"""The processes of the emulated testbed: a rank in each network namespace."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from testbed_links import Layout, address, namespace

MASTER_PORT = 29400
# The node of each rank, by rank, with commas between.
NODE_MAP = "MEGATRON_RESILIENT_NODE_MAP"
# How long ranks may take to end once one has failed.
_GRACE_SECONDS = 5.0
_TICK_SECONDS = 0.02


def environment(layout: Layout, rank: int) -> dict[str, str]:
    """Returns the variables of a rank: torchrun's own, gloo's and the node map."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.world),
        "LOCAL_RANK": str(rank % layout.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
        "GROUP_RANK": str(layout.node(rank)),
        "GROUP_WORLD_SIZE": str(layout.nodes),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
        # It gives gloo the address alone; routes choose the link.
        "GLOO_SOCKET_IFNAME": "inter",
        NODE_MAP: ",".join(str(layout.node(peer)) for peer in range(layout.world)),
    }


def run_ranks(layout: Layout, command: Sequence[str]) -> int:
    """Runs a command in every namespace until all have ended, or one has failed.

    Then the others get SIGTERM, and SIGKILL some seconds later. SIGTERM, SIGINT and SIGHUP to the
    caller do the same.

    Returns:
        0, or the status of the rank that failed first (128 and its signal, if one killed it).
    """
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    ranks = [_start(layout, rank, command) for rank in range(layout.world)]
    readers = [
        _forward(f"[node{layout.node(rank)} rank{rank}] ".encode(), pipe, target)
        for rank, process in enumerate(ranks)
        for pipe, target in ((process.stdout, 1), (process.stderr, 2))
    ]
    status = 0
    while status == 0:
        ended = [rank.poll() for rank in ranks]
        if stop:
            status = 128 + stop[0]
        elif failed := [own for own in ended if own]:
            status = failed[0] if failed[0] > 0 else 128 - failed[0]
        elif None not in ended:
            break
        time.sleep(_TICK_SECONDS)
    _end(ranks)
    for reader in readers:
        reader.join(_GRACE_SECONDS)  # a process that a rank left behind may hold its pipe
    return status


def _start(layout: Layout, rank: int, command: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace(rank), *command],
        env={"OMP_NUM_THREADS": "1", **os.environ, **environment(layout, rank)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _forward(prefix: bytes, pipe: BinaryIO, target: int) -> threading.Thread:
    """Passes lines on, each in one write, so that those of several ranks do not mix."""

    def pass_on() -> None:
        for line in pipe:
            data = prefix + line.removesuffix(b"\n") + b"\n"
            with contextlib.suppress(BrokenPipeError):  # nobody reads us: ranks go on
                while data:
                    data = data[os.write(target, data) :]

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    return thread


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a Python script as this one is run; output is not held back."""
    return [sys.executable, "-u", script, *arguments]
