"""Emulated nodes with a real coordinator: `run_elastic_job.py NODES REJOIN SCRIPT ARGS...`."""

import sys

from megatron_resilient.elastic import launcher
from megatron_resilient.elastic.agent import AgentSettings
from megatron_resilient.elastic.limits import Limits
from tests.support.run_job import preload

LIMITS = Limits(
    heartbeat_interval=0.25,
    heartbeat_timeout=2,
    fence_timeout=10,
    join_window=0.5,
    rejoin_timeout=20,
    coordinator_timeout=20,
    leave_timeout=20,
)

if __name__ == "__main__":
    nodes, rejoin, *command = sys.argv[1:]
    settings = AgentSettings(
        node="",
        host="127.0.0.1",
        port=launcher.free_port(),
        token=launcher.new_token(),
        workers=1,
        max_restarts=1,
        limits=LIMITS,
    )
    coordinator = (
        *(sys.executable, "-m", "megatron_resilient.cli", "coordinator"),
        *("--port", str(settings.port), "--nnodes", f"1:{nodes}"),
        *LIMITS.flags(),
    )
    job = launcher.JobSettings(
        launcher.emulated(settings, int(nodes)), coordinator, float(rejoin) if rejoin else None
    )
    sys.exit(launcher.run_job(job, launcher.fork_body(command), preload))
