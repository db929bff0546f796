"""Runs commands of `megatron-resilient` in forks of one process that has imported Megatron.

Reads {"argv": [...], "environment": {...}, "output": file} lines, answers {"pid": n}, and later
{"ended": n, "status": s} for each. Its children die with it, and it dies with who started it.
"""

import ctypes
import json
import os
import select
import signal
import sys

from megatron_resilient import cli
from megatron_resilient.commands import coordinator, run  # noqa: F401
from megatron_resilient.elastic import child, launcher  # noqa: F401
from megatron_resilient.elastic import coordinator as server  # noqa: F401
from megatron_resilient.mcore.preload import preload

_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 0.02


def start(request):
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def body():
        os.environ.update(request["environment"])
        child.call(lambda: sys.exit(cli.main(request["argv"])))

    pid = child.fork(body, stdout=output, stderr=output)
    os.close(output)
    return pid


def serve():
    running = set()
    rest = b""
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if select.select([0], [], [], _TICK_SECONDS)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                pid = start(json.loads(line))
                running.add(pid)
                print(json.dumps({"pid": pid}), flush=True)
        for pid in list(running):
            status = child.poll(pid)
            if status is not None:
                running.discard(pid)
                print(json.dumps({"ended": pid, "status": status}), flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    preload()
    serve()
