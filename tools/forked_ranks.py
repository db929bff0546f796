"""Starts the ranks of a script as torchrun does, forked from a process that has imported Megatron.

    forked_ranks.py RANKS SCRIPT ARGS...

Ten nodes import beside each other; ten ranks on one machine's few cores would do so one after the
other. Here the import is done once for all, at each start, so that it takes what it takes a node.
No elastic features: if a rank fails, all are ended. The status is the first that is not 0.
"""

import os
import sys
import time
from collections.abc import Sequence

from megatron_resilient.elastic import child, launcher

_TICK_SECONDS = 0.1
_KILLED = 1


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets for a rank of one machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    texts = {name: str(value) for name, value in own.items()}
    return texts | {"MASTER_ADDR": launcher.LOOPBACK, "MASTER_PORT": str(port)}


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks, and waits for them."""
    ranks, command = int(arguments[0]), arguments[1:]
    from megatron_resilient.mcore.preload import preload

    preload()
    port, body = launcher.free_port(), launcher.fork_body(command)
    running = set()
    for rank in range(ranks):
        own = variables(rank, ranks, port)
        running.add(child.fork(lambda own=own: body(own)))
    while running:
        time.sleep(_TICK_SECONDS)
        for pid in list(running):
            status = child.poll(pid)
            if status is None:
                continue
            running.remove(pid)
            if status != 0:
                for other in running:
                    child.kill(other)
                    os.waitpid(other, 0)
                return status if status > 0 else _KILLED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
