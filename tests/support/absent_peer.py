"""One rank of two: rank 0 calls a collective that rank 1 never joins, and has to come out of it.

Arguments: rank, path of a FileStore, collective, repetitions. Prints one JSON object.
"""

import json
import sys
import threading
import time

import torch
import torch.distributed as dist

from megatron_resilient.elastic import fenced_wait, graveyard, sockets

NUMBERS = 100_000  # more than one of gloo's segments, so that a send waits for its receiver
CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(NUMBERS)),
    "all_to_all": lambda: dist.all_to_all_single(torch.zeros(NUMBERS), torch.ones(NUMBERS)),
    "all_gather": lambda: dist.all_gather([torch.zeros(9), torch.zeros(9)], torch.ones(9)),
    "barrier": dist.barrier,
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(8)),
    "broadcast": lambda: dist.broadcast(torch.ones(NUMBERS), src=1),
    "object": lambda: dist.all_gather_object([None, None], "x"),
    "asynchronous": lambda: dist.all_reduce(torch.ones(9), async_op=True).wait(),
    "send": lambda: dist.send(torch.ones(10 * NUMBERS), dst=1),
    "recv": lambda: dist.recv(torch.ones(NUMBERS), src=1),
    "batch": lambda: [
        work.wait()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(10 * NUMBERS), 1),
                dist.P2POp(dist.irecv, torch.ones(NUMBERS), 1),
            ]
        )
    ],
}


class OverError(Exception):
    """The generation is."""


class Generation:
    def __init__(self):
        self.over = False
        self.over_at = 0.0

    def check(self):
        if self.over:
            raise OverError

    def end(self, spare):
        """Sets the flag, and cuts the sockets if `spare` says which to leave."""
        time.sleep(0.12)  # rank 0 waits by then
        self.over, self.over_at = True, time.monotonic()
        if spare is not None:
            sockets.cut_sockets(spare)


def main(rank: int, path: str, name: str, repetitions: int) -> None:
    store = dist.FileStore(path, 2)
    errors, seconds, retired, progress = set(), [], [], []
    # Those are not waited for in pieces: their sockets are cut. The others must come out without.
    cuts = name in ("send", "recv", "batch", "reduce_scatter")
    for repetition in range(repetitions):
        spare, generation = sockets.tcp_inodes(), Generation()
        fenced_wait.install(generation.check, lambda: progress.append(1))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"{repetition}", store), rank=rank, world_size=2
        )
        dist.all_reduce(torch.ones(2))
        if rank == 0:
            watchdog = threading.Thread(target=generation.end, args=(spare if cuts else None,))
            watchdog.start()
            try:
                CALLS[name]()
            except (OverError, RuntimeError) as error:
                seconds.append(time.monotonic() - generation.over_at)
                errors.add(type(error).__name__)
            watchdog.join()
        store.set(f"out {repetition} {rank}", "")
        store.wait([f"out {repetition} {other}" for other in range(2)])
        sockets.cut_sockets(spare)
        retired.append(graveyard.retire(dist.destroy_process_group, wait_seconds=10))
        left = sockets.tcp_inodes() - spare
    answer = {
        "errors": sorted(errors),
        "out": len(seconds),
        "slowest": max(seconds, default=0),
        "retired": all(retired),
        "sockets_left": len(left),
        "progress": len(progress),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
