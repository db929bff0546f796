"""What process groups and the store cost: gloo on this machine, and Megatron's calls counted."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from tests.support import gloo_ranks

_ROUNDS = 20

# Megatron's own initialize_model_parallel in a made-up world: only the calls are counted.
_COUNT = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import megatron_resilient
world, stages = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
calls = own = 0
def counted(ranks=None, *args, **kwargs):
    global calls, own
    calls += 1
    own += ranks is None or 0 in ranks
    return dist.group.WORLD
dist.new_group = counted
megatron_resilient.enable()
from megatron.core import parallel_state
parallel_state.initialize_model_parallel(
    pipeline_model_parallel_size=stages,
    expert_model_parallel_size=world // stages,
    expert_tensor_parallel_size=1,
)
print(json.dumps([calls, own]))
"""


def count_calls(ranks: int, stages: int) -> tuple[int, int]:
    """Returns Megatron's calls of `new_group` on every rank, and how many rank 0 is in."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, str(ranks), str(stages)],
        check=True,
        capture_output=True,
        text=True,
    )
    calls, own = json.loads(done.stdout.splitlines()[-1])
    return int(calls), int(own)


def gloo_groups(ranks: int) -> dict[str, float]:
    """Returns seconds of a gloo group of all `ranks` processes, and of one of others."""
    with tempfile.TemporaryDirectory() as folder:
        told = gloo_ranks.run("benchmarks.scale_groups:on_a_rank", ranks, Path(folder))
    return {name: max(each[name] for each in told) for name in told[0]}


def on_a_rank() -> dict[str, float]:
    """Runs on every rank; see `gloo_groups`."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.new_group()
    member = (time.perf_counter() - began) / _ROUNDS
    dist.barrier()
    foreign = []
    for number in range(50 * _ROUNDS):
        began = time.perf_counter()
        dist.new_group([number % world])
        if number % world != rank:
            foreign.append(time.perf_counter() - began)
    dist.barrier()
    return {"member": member, "foreign": sum(foreign) / len(foreign)}


def store_rate(clients: int = 4, seconds: float = 1.5) -> float:
    """Returns operations per second of a store as the coordinator has one, all clients together."""
    from torch.distributed import TCPStore

    from megatron_resilient.elastic.store import open_torch_store

    server = open_torch_store("127.0.0.1")
    done = [0] * clients

    def ask(number: int) -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            store.set(f"key{number}", "0123456789" * 10)
            store.get(f"key{number}")
            done[number] += 2

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    return sum(done) / seconds
