"""Nodes that a driver starts one by one, forked from a process that has imported Megatron once.

    soak_nodes.py SETTINGS SCRIPT ARGS...

SETTINGS are the agents' in JSON: host, port, limits, log_dir; the token is in the environment. A
line on stdin is the name of a node to start; each start and each end is a JSON line on stdout.
Without the driver, which closes stdin or dies, there are no nodes.
"""

import json
import os
import select
import sys
from pathlib import Path
from typing import NoReturn

from megatron_resilient.elastic import child, launcher
from megatron_resilient.elastic.agent import AgentSettings
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.protocol import read_token

_TICK_SECONDS = 0.1
# Ours start again as often as they are killed.
_MAX_RESTARTS = 1_000_000


def start(node: str, settings: dict, command: list[str]) -> int:
    """Forks an agent; returns its pid."""
    own = AgentSettings(
        node=node,
        host=settings["host"],
        port=settings["port"],
        token=read_token(),
        workers=1,
        max_restarts=_MAX_RESTARTS,
        limits=Limits(**settings["limits"]),
        log_dir=Path(settings["log_dir"]),
    )

    def body() -> NoReturn:
        outcome = launcher.run_agent(own, launcher.fork_body(command))
        sys.stderr.flush()
        os._exit(outcome.code)

    return child.fork(body, stdout=2)


def main() -> None:
    """Starts and reaps agents until stdin ends."""
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    from megatron_resilient.mcore.preload import preload

    preload()
    print(json.dumps({"ready": True}), flush=True)
    agents: dict[int, str] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], _TICK_SECONDS)
        if ready:
            chunk = os.read(0, 4096)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                node = line.decode()
                pid = start(node, settings, command)
                agents[pid] = node
                print(json.dumps({"node": node, "pid": pid}), flush=True)
        for pid in list(agents):
            status = child.poll(pid)
            if status is not None:
                told = {"node": agents.pop(pid), "pid": pid, "status": status}
                print(json.dumps(told), flush=True)
    for pid in agents:
        child.kill(pid)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
