"""The agent of a node: starts its workers, watches them, and leaves with them. Imports no torch."""

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron_resilient.elastic import child
from megatron_resilient.elastic.environment import WorkerEnvironment
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.link import Link
from megatron_resilient.elastic.messages import (
    AGENT,
    Beat,
    FromServer,
    Hello,
    Leave,
    Stop,
    WorkerExit,
)
from megatron_resilient.elastic.worker_output import WorkerOutput
from megatron_resilient.error_report import JOB_IS_OVER, WRONG_USAGE
from megatron_resilient.errors import ConfigError, RefusedError

WorkerBody = Callable[[dict[str, str]], NoReturn]
"""What a forked worker does: given the agent's variables, it becomes the training process."""

_TICK_SECONDS = 0.2
# After one worker has ended with an error: for the others to say theirs.
_LAST_WORDS_SECONDS = 1.0
_FLUSH_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is told.

    Attributes:
        node: the node's id.
        host: where the coordinator listens.
        port: its TCP port.
        token: the job's secret.
        workers: how many the node has.
        min_nodes: the fewest nodes that may train.
        max_restarts: how often workers that failed are started again, to join anew.
        limits: the job's limits of time.
        log_dir: folder for what workers print; None shows it with the worker's name before it.
    """

    node: str
    host: str
    port: int
    token: bytes = field(repr=False)
    workers: int
    min_nodes: int = 1
    max_restarts: int = 3
    limits: Limits = field(default_factory=Limits)
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--nproc-per-node {self.workers}: a node needs at least 1 worker")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: give 0 or more")


@dataclass(frozen=True)
class Outcome:
    """How an agent ended.

    Attributes:
        code: exit code.
        how: `finished` (training is done), `left` (as planned), or `failed`.
    """

    code: int
    how: str


@dataclass
class _Worker:
    local_rank: int
    pid: int
    outputs: tuple[WorkerOutput, WorkerOutput]
    status: int | None = None


class Agent:
    """Runs the workers of one node until they are done, have left, or failed too often."""

    def __init__(
        self, settings: AgentSettings, body: WorkerBody, on_error: Callable[[str], None]
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: what to run where.
            body: what a worker does.
            on_error: is given each distinct error of ours that a worker prints.
        """
        self._settings = settings
        self._body = body
        self._on_error = on_error
        self._said: set[str] = set()
        self._id = secrets.token_hex(8)
        self._workers: list[_Worker] = []
        self._exits: list[WorkerExit] = []  # of this start: said again after a reconnect
        self._restarts = 0
        self._signals: list[int] = []
        self._leaving_until: float | None = None
        self._stop: Stop | None = None
        self._stop_until = 0.0
        self._next_beat = 0.0
        self._link = Link(
            settings.host,
            settings.port,
            settings.token,
            self._hello,
            settings.limits.heartbeat_timeout,
        )
        self._woken, self._waker = socket.socketpair()

    def run(self) -> Outcome:
        """Runs until the end; for the main thread, which gets the signals."""
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        previous = {
            number: signal.signal(number, handler)
            for number, handler in (
                (signal.SIGTERM, self._note),
                (signal.SIGINT, self._note),
                (signal.SIGCHLD, lambda *_: None),  # the descriptor below is what wakes us
            )
        }
        wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            return self._run()
        finally:
            self._kill()
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._link.close()
            self._woken.close()
            self._waker.close()

    def _run(self) -> Outcome:
        while True:
            self._start()
            try:
                outcome = self._watch()
            except RefusedError as error:
                self._tell(f"RefusedError: {error}")
                return Outcome(1, "failed")
            if outcome is not None:
                return outcome
            self._restarts += 1
            pause = _FIRST_PAUSE_SECONDS * 2 ** min(self._restarts - 1, 5)
            self._say(
                f"starts its workers again in {pause:g} s "
                f"({self._restarts} of {self._settings.max_restarts})"
            )
            outcome = self._pause(pause)
            if outcome is not None:
                return outcome

    # Starting and ending workers.

    def _start(self) -> None:
        while not self._link.is_quiet:  # a thread is about to connect
            self._link.wait(_TICK_SECONDS)
        self._workers, self._exits = [], []
        for local_rank in range(self._settings.workers):
            self._workers.append(self._start_one(local_rank))
        pids = " ".join(str(worker.pid) for worker in self._workers)
        self._say(f"agent {os.getpid()} started workers {pids}")

    def _start_one(self, local_rank: int) -> _Worker:
        settings, limits = self._settings, self._settings.limits
        variables = WorkerEnvironment(
            host=settings.host,
            port=settings.port,
            token=settings.token,
            node=settings.node,
            local_rank=local_rank,
            local_world=settings.workers,
            min_nodes=settings.min_nodes,
            heartbeat_interval=limits.heartbeat_interval,
            heartbeat_timeout=limits.heartbeat_timeout,
            fence_timeout=limits.fence_timeout,
            coordinator_timeout=limits.coordinator_timeout,
        ).variables()
        stdout, stderr = (self._output(local_rank, target) for target in (1, 2))

        def body() -> NoReturn:
            self._forget_parent(stdout, stderr)
            self._body(variables)

        pid = child.fork(body, stdout=stdout.write_end, stderr=stderr.write_end)
        stdout.close_write_end()
        stderr.close_write_end()
        return _Worker(local_rank, pid, (stdout, stderr))

    def _output(self, local_rank: int, target: int) -> WorkerOutput:
        settings = self._settings
        log = None
        if settings.log_dir is not None:
            stream = "stdout" if target == 1 else "stderr"
            log = settings.log_dir / settings.node / f"{local_rank}.{stream}.log"
        return WorkerOutput(f"{settings.node}.{local_rank}", target, log, self._tell)

    def _forget_parent(self, *outputs: WorkerOutput) -> None:
        """In the child: gives up what belongs to the agent."""
        self._link.abandon()
        self._woken.close()
        self._waker.close()
        for output in (*outputs, *(one for w in self._workers for one in w.outputs)):
            for end in (output.read_end, output.write_end):
                if end >= 0:
                    os.close(end)

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.status is None:
                child.kill(worker.pid)
                worker.status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
                self._note_exit(worker)

    # Watching.

    def _watch(self) -> Outcome | None:
        """Returns how the agent ends; None: the workers are to be started again."""
        kill_at: float | None = None
        while True:
            self._tick()
            self._reap()
            running = [worker for worker in self._workers if worker.status is None]
            failed = [worker for worker in self._workers if worker.status]
            outcome = self._asked_to_end()
            if outcome is not None:
                return outcome
            if failed and running:
                # One lost is all lost: they are one failure domain.
                killed = any((worker.status or 0) < 0 for worker in failed)
                now = time.monotonic()
                kill_at = now + _LAST_WORDS_SECONDS if kill_at is None else kill_at
                if killed or now >= kill_at:
                    self._kill()
            elif not running:
                return self._judge()

    def _judge(self) -> Outcome | None:
        """All workers have ended by themselves."""
        statuses = [worker.status or 0 for worker in self._workers]
        self._flush()
        if not any(statuses):
            # Nobody else can say whether there is more to train than those who trained.
            return Outcome(0, "finished" if self._leaving_until is None else "left")
        usage, over = WRONG_USAGE in statuses, JOB_IS_OVER in statuses
        if usage or over or self._leaving_until is not None or self._stop is not None:
            return Outcome(WRONG_USAGE if usage else 1, "failed")
        if self._restarts < self._settings.max_restarts:
            return None
        self._say(f"gives up: {self._describe(statuses)}")
        return Outcome(1, "failed")

    def _describe(self, statuses: list[int]) -> str:
        return ", ".join(
            f"worker {rank} "
            + (f"exited with {status}" if status > 0 else f"was ended by signal {-status}")
            for rank, status in enumerate(statuses)
            if status
        )

    def _pause(self, seconds: float) -> Outcome | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()
            outcome = self._asked_to_end()
            if outcome is not None:
                return outcome
        return None

    def _asked_to_end(self) -> Outcome | None:
        """Obeys signals and the coordinator; returns an outcome when the end has come."""
        running = any(worker.status is None for worker in self._workers)
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTERM and not running:
                return Outcome(0, "left")
            if number == signal.SIGTERM and self._leaving_until is None:
                self._say("leaves at the next step boundary")
                self._leaving_until = time.monotonic() + self._settings.limits.leave_timeout
                self._link.send(Leave())
            else:
                self._kill()
                self._flush()
                return Outcome(128 + number, "failed")
        now = time.monotonic()
        if self._leaving_until is not None and running and now > self._leaving_until:
            self._say(
                f"did not get away within {self._settings.limits.leave_timeout:g} s: "
                "kills its workers"
            )
            self._kill()
            self._flush()
            return Outcome(1, "failed")
        if self._stop is not None and (not running or now > self._stop_until):
            return self._stopped(self._stop)
        return None

    def _stopped(self, stop: Stop) -> Outcome:
        self._kill()
        self._flush()
        statuses = [worker.status or 0 for worker in self._workers]
        if message := getattr(stop, "message", ""):
            self._tell(f"RefusedError: {message}")
        code = stop.code or max((1 for status in statuses if status), default=0)
        if code:
            return Outcome(code, "failed")
        return Outcome(0, "finished" if self._leaving_until is None else "left")

    def _tick(self) -> None:
        outputs = {
            output.read_end: output
            for worker in self._workers
            for output in worker.outputs
            if output.read_end >= 0
        }
        connections = self._link.connections
        orders, ready = self._link.wait(_TICK_SECONDS, [self._woken.fileno(), *outputs])
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        for descriptor in ready & outputs.keys():
            outputs[descriptor].forward()
        for order in orders:
            self._obey(order)
        now = time.monotonic()
        if connections != self._link.connections:
            self._next_beat = now
            for ended in self._exits:
                self._link.send(ended)
            if self._leaving_until is not None:
                self._link.send(Leave())
        if now >= self._next_beat:
            self._next_beat = now + self._settings.limits.heartbeat_interval
            self._link.send(Beat())

    def _obey(self, order: FromServer) -> None:
        if isinstance(order, Stop) and self._stop is None:
            self._stop = order
            # The workers are told as well, and end by themselves.
            self._stop_until = time.monotonic() + self._settings.limits.fence_timeout

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.status is None:
                worker.status = child.poll(worker.pid)
                if worker.status is not None:
                    child.kill(worker.pid)  # what it started
                    self._note_exit(worker)

    def _note_exit(self, worker: _Worker) -> None:
        for output in worker.outputs:
            output.close()
        ended = WorkerExit(worker.local_rank, worker.status or 0, worker.pid)
        self._exits.append(ended)
        self._link.send(ended)

    def _flush(self) -> None:
        """Has the coordinator hear the last news, if it is there."""
        until = time.monotonic() + _FLUSH_SECONDS
        while not self._link.is_open and time.monotonic() < until:
            self._tick()

    # Talking.

    def _tell(self, error: str) -> None:
        # All ranks fail alike.
        if error not in self._said:
            self._said.add(error)
            self._on_error(error)

    def _say(self, text: str) -> None:
        print(f"[{self._settings.node}] {text}", file=sys.stderr, flush=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _hello(self) -> Hello:
        return Hello(
            role=AGENT,
            node=self._settings.node,
            id=self._id,
            local_world=self._settings.workers,
            pid=os.getpid(),
        )
