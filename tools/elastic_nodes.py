"""An elastic job whose nodes a driver starts and ends one by one, by process id.

The same coordinator, agents and workers as those of `megatron-resilient run --emulate-nodes`, but
nodes come when they are told to: that command can only bring one back a fixed time after its loss.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from megatron_resilient.elastic import launcher
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.protocol import TOKEN_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0  # for the forker to import, and then to say that an agent has started
END_SECONDS = 10.0


class ElasticNodes:
    """A coordinator, and nodes of one rank each; a context manager that leaves none behind.

    Attributes:
        agents: the nodes that run, and their agents' process ids.
    """

    def __init__(
        self,
        script: Path,
        flags: Sequence[str],
        folder: Path,
        limits: Limits,
        most: int,
        env: Mapping[str, str],
    ) -> None:
        """Starts the coordinator and the process that forks nodes; no node yet.

        Args:
            script: what nodes run.
            flags: of it; its run folder is `folder`/run.
            folder: for all that the job writes; must be there.
            limits: of time.
            most: nodes that a start waits for.
            env: variables beside those of this process.

        Raises:
            RuntimeError: a process ended at once.
        """
        self.agents: dict[str, int] = {}
        self._folder = folder
        port = launcher.free_port()
        run_dir = folder / "run"
        run_dir.mkdir(exist_ok=True)
        environment = os.environ | {TOKEN_VARIABLE: secrets.token_hex(16)} | dict(env)
        settings = {
            "host": launcher.LOOPBACK,
            "port": port,
            "limits": asdict(limits),
            "log_dir": str(folder / "logs"),
        }
        coordinator = [
            *(sys.executable, "-m", "megatron_resilient.cli", "coordinator", "--port", str(port)),
            *("--nnodes", f"1:{most}", *limits.flags(), "--run-dir", str(run_dir)),
        ]
        nodes = [
            *(sys.executable, str(ROOT / "tools" / "soak_nodes.py"), json.dumps(settings)),
            *(str(script), *flags, "--resilient-device", "cpu", "--resilient-run-dir"),
            str(run_dir),
        ]
        options: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
        self._processes: list[subprocess.Popen[str]] = []
        try:
            with (folder / "coordinator.log").open("w") as told:
                self._processes.append(
                    subprocess.Popen(
                        coordinator, stdin=subprocess.DEVNULL, stdout=told, stderr=told, **options
                    )
                )
            with (folder / "nodes.log").open("w") as log:
                self._forker = subprocess.Popen(
                    nodes,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    **options,
                )
            self._processes.append(self._forker)
            assert self._forker.stdout is not None
            os.set_blocking(self._forker.stdout.fileno(), False)
            self._rest = b""
            self._unread: list[dict[str, Any]] = []
            self._await("ready")
        except BaseException:
            self.close()
            raise

    def start(self, node: str) -> None:
        """Starts a node."""
        assert self._forker.stdin is not None
        self._forker.stdin.write(node + "\n")
        self._forker.stdin.flush()
        self.agents[node] = int(self._await("pid", node)["pid"])

    def kill(self, node: str) -> None:
        """Kills a node's agent with SIGKILL; its training process dies with it."""
        psutil.Process(self.agents.pop(node)).kill()

    def leave(self, node: str) -> None:
        """Tells a node to leave as planned."""
        psutil.Process(self.agents.pop(node)).terminate()

    def check(self) -> None:
        """Looks whether all that should run does.

        Raises:
            RuntimeError: a process, or a node, ended by itself.
        """
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeError(
                    f"a process of the job ended with status {process.returncode}: see "
                    f"{self._folder}"
                )
        unread, self._unread = self._unread, []
        for said in (*unread, *self._said()):
            if self.agents.get(said.get("node", "")) == said.get("pid") and "status" in said:
                raise RuntimeError(f"{said['node']} ended by itself: see {self._folder}/logs")

    def close(self) -> None:
        """Ends all of it with SIGKILL."""
        started = [psutil.Process(each.pid) for each in self._processes if each.poll() is None]
        doomed = list(started)
        for process in started:
            with suppress(psutil.NoSuchProcess):  # it ended by itself just now
                process.suspend()
                doomed += process.children(recursive=True)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, END_SECONDS)
        for each in self._processes:
            each.wait()
            for stream in (each.stdin, each.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # what was not written is for nobody
                        stream.close()

    def _await(self, key: str, node: str | None = None) -> dict[str, Any]:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            self._unread += self._said()
            for said in self._unread:
                if key in said and "status" not in said and said.get("node") == node:
                    self._unread.remove(said)
                    return said
            if self._forker.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"nodes do not start: see {self._folder}/nodes.log")

    def _said(self) -> list[dict[str, Any]]:
        assert self._forker.stdout is not None
        with suppress(BlockingIOError):  # nothing new
            self._rest += os.read(self._forker.stdout.fileno(), 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
