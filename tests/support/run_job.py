"""Emulated nodes in a process of their own: `run_job.py NODES WORKERS REJOIN SCRIPT ARGS...`.

The launcher imports torch before it forks. There is no coordinator: the script needs none.
"""

import os
import sys

from megatron_resilient.elastic import launcher
from megatron_resilient.elastic.agent import AgentSettings
from megatron_resilient.elastic.limits import Limits


def preload():
    import torch

    assert len(os.listdir("/proc/self/task")) == 1
    torch.manual_seed(0)


if __name__ == "__main__":
    nodes, workers, rejoin, *command = sys.argv[1:]
    settings = AgentSettings(
        node="",
        host="127.0.0.1",
        port=launcher.free_port(),
        token=b"",
        workers=int(workers),
        max_restarts=0,
        limits=Limits(leave_timeout=1),
    )
    job = launcher.JobSettings(
        launcher.emulated(settings, int(nodes)),
        rejoin_after=float(rejoin) if rejoin else None,
    )
    sys.exit(launcher.run_job(job, launcher.fork_body(command), preload))
