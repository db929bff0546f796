"""An agent in a process of its own: `run_agent.py PORT exec|fork WORKERS RESTARTS LOG_DIR CODE`.

Its workers run CODE. Prints how it ended.
"""

import sys
from pathlib import Path

from megatron_resilient.elastic import child
from megatron_resilient.elastic.agent import Agent, AgentSettings
from megatron_resilient.elastic.launcher import exec_body
from megatron_resilient.elastic.limits import Limits
from tests.support.fake_coordinator import TOKEN


def fork_body(code):
    def body(variables):
        import os

        os.environ.update(variables)
        child.call(lambda: exec(compile(code, "code", "exec"), {"__name__": "__main__"}))

    return body


if __name__ == "__main__":
    port, way, workers, restarts, log_dir, code = sys.argv[1:]
    settings = AgentSettings(
        node="node7",
        host="127.0.0.1",
        port=int(port),
        token=TOKEN,
        workers=int(workers),
        max_restarts=int(restarts),
        limits=Limits(heartbeat_interval=0.2, leave_timeout=30),
        log_dir=Path(log_dir) if log_dir else None,
    )
    body = fork_body(code) if way == "fork" else exec_body(["-c", code])
    outcome = Agent(settings, body, lambda error: print(f"named: {error}", flush=True)).run()
    assert "torch" not in sys.modules
    print(f"outcome: {outcome.code} {outcome.how}", flush=True)
