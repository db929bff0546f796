"""Starts what a job needs on this machine: a coordinator, and the agents of one node or several.

Emulated nodes are forked: the launcher imports what training needs once, its agents and their
workers inherit it. That holds as long as no thread ran before the fork; `preload` must start none.
"""

import json
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from megatron_resilient.elastic import child
from megatron_resilient.elastic.agent import Agent, AgentSettings, Outcome, WorkerBody
from megatron_resilient.elastic.coordinator_child import CoordinatorChild
from megatron_resilient.errors import ConfigError

LOOPBACK = "127.0.0.1"
_TICK_SECONDS = 0.2
_COORDINATOR_END_SECONDS = 2.0
_WRONG_USAGE = 2


@dataclass(frozen=True)
class JobSettings:
    """One job on this machine.

    Attributes:
        nodes: settings of the agents, one a node.
        coordinator: command line that starts the coordinator; None if somebody else runs it.
        rejoin_after: seconds after which a node that was killed starts again; None: never.
    """

    nodes: tuple[AgentSettings, ...]
    coordinator: tuple[str, ...] | None = None
    rejoin_after: float | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("--emulate-nodes: give at least 1")
        if self.rejoin_after is not None and self.rejoin_after < 0:
            raise ConfigError(f"--rejoin-after {self.rejoin_after:g}: give 0 or more seconds")


def exec_body(command: Sequence[str]) -> WorkerBody:
    """Returns a worker that is a fresh Python: [script, arguments...]."""
    whole = [sys.executable, *command]

    def body(variables: dict[str, str]) -> NoReturn:
        child.execute(whole, os.environ | variables)

    return body


def fork_body(command: Sequence[str]) -> WorkerBody:
    """Returns a worker that runs the script in the process as it is, imports included."""

    def body(variables: dict[str, str]) -> NoReturn:
        os.environ.update(variables)
        child.call(lambda: _run_script(command))

    return body


def run_agent(settings: AgentSettings, body: WorkerBody) -> Outcome:
    """Runs one agent in this process."""
    return Agent(settings, body, _show_error).run()


def free_port() -> int:
    """Returns a loopback port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def new_token() -> bytes:
    """Returns a secret for one job."""
    return secrets.token_hex(32).encode()


def run_job(
    settings: JobSettings, body: WorkerBody, preload: Callable[[], None] | None = None
) -> int:
    """Runs all of a job on this machine.

    SIGTERM makes all nodes leave: the job saves and ends. SIGINT, or a second SIGTERM, kills it.

    Args:
        settings: what to run.
        body: what a worker does.
        preload: imports what the workers share; called once, after the coordinator was started.

    Returns:
        0 if training finished or left as asked; the worst status of the nodes otherwise.
    """
    return _Job(settings, body).run(preload)


@dataclass
class _Node:
    settings: AgentSettings
    pid: int | None = None  # of its agent
    again_at: float | None = None
    outcome: Outcome | None = None  # how it ended last


class _Job:
    def __init__(self, settings: JobSettings, body: WorkerBody) -> None:
        self._settings = settings
        self._body = body
        self._nodes = [_Node(node) for node in settings.nodes]
        self._coordinator: CoordinatorChild | None = None
        self._give_up_at: float | None = None
        self._news, self._tell = os.pipe()  # agents write, one line each time
        self._rest = b""
        self._said: set[str] = set()
        self._signals: list[int] = []
        self._terminated = False
        self._finished = False
        self._woken, self._waker = socket.socketpair()

    def run(self, preload: Callable[[], None] | None) -> int:
        os.set_blocking(self._news, False)
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        previous = {
            number: signal.signal(number, handler)
            for number, handler in (
                (signal.SIGTERM, self._note),
                (signal.SIGINT, self._note),
                (signal.SIGCHLD, lambda *_: None),
            )
        }
        wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            if self._settings.coordinator is not None:
                token = self._settings.nodes[0].token
                self._coordinator = CoordinatorChild(self._settings.coordinator, token)
            if preload is not None:
                preload()
            for node in self._nodes:
                self._start_node(node)
            return self._watch()
        finally:
            self._kill_nodes()
            if self._coordinator is not None:
                self._coordinator.end()
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            for descriptor in (self._news, self._tell):
                os.close(descriptor)
            self._woken.close()
            self._waker.close()

    def _watch(self) -> int:
        while True:
            poll = select.poll()
            poll.register(self._news, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            poll.poll(_TICK_SECONDS * 1000)
            self._drain()
            self._reap()
            self._hear()
            status = self._obey_signals()
            if status is not None:
                return status
            self._restart()
            status = self._look_after_coordinator()
            if status is not None:
                return status
            if all(node.pid is None and node.again_at is None for node in self._nodes):
                return self._status()

    def _look_after_coordinator(self) -> int | None:
        """Returns a status when it is gone for good and the agents did not end after it."""
        status = self._coordinator.keep() if self._coordinator is not None else None
        if status is None:
            return None
        now = time.monotonic()
        if self._give_up_at is None:
            wait = 0.0 if status == _WRONG_USAGE else self._settings.nodes[0].limits.fence_timeout
            self._give_up_at = now + wait + _COORDINATOR_END_SECONDS
        return status if now > self._give_up_at else None

    def _status(self) -> int:
        if self._finished:
            return 0
        return max(node.outcome.code if node.outcome else 1 for node in self._nodes)

    # Nodes.

    def _start_node(self, node: _Node) -> None:
        def body() -> NoReturn:
            os.close(self._news)
            self._woken.close()
            self._waker.close()
            outcome = Agent(node.settings, self._body, self._pass_error).run()
            self._write({"node": node.settings.node, "code": outcome.code, "how": outcome.how})
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(outcome.code)

        node.again_at, node.outcome = None, None
        node.pid = child.fork(body)

    def _reap(self) -> None:
        for node in self._nodes:
            if node.pid is None:
                continue
            status = child.poll(node.pid)
            if status is None:
                continue
            self._hear()  # what it wrote last
            node.pid = None
            if node.outcome is not None and node.outcome.how == "finished":
                # Nobody has to come back for a job that is done.
                self._finished = True
            elif node.outcome is None or node.outcome.how == "failed":
                self._lost(node, status)

    def _lost(self, node: _Node, status: int) -> None:
        after = self._settings.rejoin_after
        if node.outcome is None:  # it was killed, and said nothing
            node.outcome = Outcome(1, "failed")
            if after is not None:
                node.again_at = time.monotonic() + after
            again = "" if after is None else f"; comes back in {after:g} s"
            how = f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
            print(f"[{node.settings.node}] agent {how}{again}", file=sys.stderr, flush=True)

    def _restart(self) -> None:
        running = any(node.pid is not None for node in self._nodes)
        for node in self._nodes:
            if node.again_at is None:
                continue
            if self._finished or self._terminated or not running:
                node.again_at = None  # there is nothing left to join
            elif time.monotonic() >= node.again_at:
                self._start_node(node)

    def _kill_nodes(self, number: int = signal.SIGKILL) -> None:
        for node in self._nodes:
            if node.pid is not None:
                child.kill(node.pid, number)

    # What agents say.

    def _pass_error(self, error: str) -> None:
        self._write({"error": error})

    def _write(self, news: dict[str, object]) -> None:
        # One write of less than a page is not mixed with another one's.
        line = json.dumps(news)
        if len(line) > _LONGEST_NEWS:
            line = json.dumps({"error": str(news.get("error"))[: _LONGEST_NEWS // 8]})
        os.write(self._tell, line.encode() + b"\n")

    def _hear(self) -> None:
        while True:
            try:
                chunk = os.read(self._news, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                news = json.loads(line)
                if "error" in news:
                    self._show(news["error"])
                else:
                    for node in self._nodes:
                        if node.settings.node == news["node"]:
                            node.outcome = Outcome(news["code"], news["how"])

    def _show(self, error: str) -> None:
        if error not in self._said:
            self._said.add(error)
            _show_error(error)

    # Signals.

    def _obey_signals(self) -> int | None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTERM and not self._terminated:
                self._terminated = True
                for node in self._nodes:
                    if node.pid is not None:
                        os.kill(node.pid, signal.SIGTERM)
            else:
                return 128 + number
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _drain(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return


_LONGEST_NEWS = 4000  # less than PIPE_BUF


def _show_error(error: str) -> None:
    print(f"megatron-resilient run: {error}", file=sys.stderr, flush=True)


def _run_script(command: Sequence[str]) -> None:
    import runpy

    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def emulated(settings: AgentSettings, number: int) -> tuple[AgentSettings, ...]:
    """Returns the settings of `number` nodes, node0 and so on, that are equal otherwise."""
    return tuple(replace(settings, node=f"node{i}") for i in range(number))
