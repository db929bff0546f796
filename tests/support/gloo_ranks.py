"""Runs a function on several gloo ranks and returns what each one answers, as JSON."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(target: str, ranks: int, folder: Path, *, timeout_seconds: float = 100, **kwargs) -> list:
    """Calls `module:function` with kwargs on every rank, in processes that end with this call.

    Args:
        target: the function; gloo is open when it is called.
        ranks: how many.
        folder: an empty folder for the rendezvous.
        timeout_seconds: then all are killed and the test fails.
        kwargs: arguments, as JSON.
    """
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.support.gloo_ranks",
                target,
                *map(str, (rank, ranks, folder / "store")),
                json.dumps(kwargs),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + timeout_seconds
    try:
        told = [p.communicate(timeout=max(1, deadline - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * ranks, [err[-3000:] for _, err in told]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def main(target: str, rank: str, ranks: str, store: str, kwargs: str) -> None:
    import torch.distributed as dist

    module, function = target.split(":")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    answer = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
