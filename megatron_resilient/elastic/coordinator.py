"""The coordinator process: an asyncio server around `Membership`.

It keeps no state on disk. Killed and started again at its address, it learns from the members that
reconnect what they are in; training goes on meanwhile.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from megatron_resilient.elastic.membership import Membership
from megatron_resilient.elastic.messages import CLIENT, Beat, FromServer
from megatron_resilient.elastic.orders import (
    Close,
    CloseStore,
    End,
    Log,
    OpenStore,
    Order,
    Record,
    Send,
)
from megatron_resilient.elastic.peer import Peer, Strangers
from megatron_resilient.elastic.protocol import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    parse_to_server,
)
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.store import open_torch_store
from megatron_resilient.errors import ConfigError, ProtocolError
from megatron_resilient.telemetry import EventLog

_TICK_SECONDS = 0.1
_LINGER_SECONDS = 10.0
_BACKLOG = 4096
# Nobody knows of a silent network whether its other end lives; a reset comes from a living kernel.
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Store(Protocol):
    """A running store."""

    port: int

    def close(self) -> None:
        """Ends it."""


class Coordinator:
    """Serves one job.

    Attributes:
        port: Where it listens, after `start`.
        membership: What it knows.
    """

    def __init__(
        self,
        rules: Rules,
        host: str,
        port: int,
        token: bytes,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        open_store: Callable[[str], Store] = open_torch_store,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Binds nothing yet.

        Args:
            rules: The limits.
            host: The address, or the name of one, to bind to.
            port: The port; 0 for any.
            token: The shared token; empty for none.
            run_dir: Where events are written; None for nowhere.
            open_store: Starts a generation's store, given the address to bind to; runs in a thread.
            say: Takes one line for people; by default it goes to stderr.

        Raises:
            ConfigError: The host is unknown, or others could reach it and there is no token.
            OSError: The run directory cannot be written.
        """
        self.port = port
        self.token = token
        self.strangers = Strangers()
        self._host = _address(host, port)
        if not token and not ipaddress.ip_address(self._host).is_loopback:
            raise ConfigError(
                f"without a token the coordinator binds to loopback only, not to {host}: set "
                f"{TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}, here and on every node"
            )
        self.membership = Membership(rules, self.now(), time.time() - self.now())
        self.say = say or _say_on_stderr
        self._open_store = open_store
        self._log = None if run_dir is None else EventLog(run_dir, rank=None, node="coordinator")
        self._peers: dict[int, Peer] = {}
        self._next_key = 1
        self._settling = False
        self._stores: dict[int, Store] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._ended: asyncio.Future[int] | None = None

    @staticmethod
    def now() -> float:
        """Returns the clock of the membership, in seconds."""
        return time.monotonic()

    async def start(self) -> None:
        """Listens from now on.

        Raises:
            OSError: The address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._server = await loop.create_server(
            lambda: Peer(self), self._host, self.port, backlog=_BACKLOG, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._start_task(self._tick())

    async def serve(self) -> int:
        """Serves until the job is over.

        Returns:
            The job's exit code.

        Raises:
            Exception: Whatever went wrong in here. A new coordinator can take over.
        """
        assert self._ended is not None
        code = await self._ended
        # Everybody shall hear that the job is over; who reconnects just now, too.
        deadline = self.now() + _LINGER_SECONDS
        while self.membership.ended and self.now() < deadline and self._has_members():
            await asyncio.sleep(_TICK_SECONDS)
        return code

    def _has_members(self) -> bool:
        return any(peer.role != CLIENT for peer in self._peers.values())

    async def close(self) -> None:
        """Stops serving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for peer in [*self._peers.values(), *self.strangers.peers]:
            peer.abort()
        for store in self._stores.values():
            store.close()
        if self._log is not None:
            self._log.close()

    def stop(self, code: int) -> None:
        """Ends `serve`. Unless the job is over, its members train on."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)

    # What peers call.

    def admitted(self, peer: Peer) -> int:
        """A peer has proved that it knows the token; returns its key."""
        hello = peer.hello
        assert hello is not None
        key, self._next_key = self._next_key, self._next_key + 1
        self._peers[key] = peer
        self._do(
            lambda: self.membership.connected(self.now(), key, hello, peer.own_host, more=True)
        )
        self._settle_soon()
        return key

    def heard(self, key: int, line: bytes) -> None:
        """A peer sent a line.

        Raises:
            ProtocolError: It is wrong.
        """
        message = parse_to_server(line)
        self._do(lambda: self.membership.received(self.now(), key, message, more=True))
        if not isinstance(message, Beat):
            self._settle_soon()

    def lost(self, key: int, error: Exception | None) -> None:
        """A peer's connection ended."""
        self._peers.pop(key, None)
        proven = not (isinstance(error, OSError) and error.errno in _SILENCE)
        self._do(lambda: self.membership.disconnected(self.now(), key, proven, more=True))
        self._settle_soon()

    def _settle_soon(self) -> None:
        """Has what depends on all members decided once, after all that is there to be read."""
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._do(lambda: self.membership.tick(self.now()))

    # What the membership orders.

    def _do(self, event: Callable[[], list[Order]]) -> None:
        try:
            self._carry_out(event())
        except ProtocolError:
            raise
        except Exception as error:
            # What the membership knows may be half changed. A new process learns it again.
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            match order:
                case Send(key, message):
                    self._send(key, message)
                case Close(key):
                    if (peer := self._peers.get(key)) is not None:
                        peer.close()
                case OpenStore(generation):
                    self._start_task(self._store(generation))
                case CloseStore(generation):
                    if (store := self._stores.pop(generation, None)) is not None:
                        # In a thread: it waits for the server's own, and members wait for us.
                        self._start_task(asyncio.to_thread(store.close))
                case Record():
                    self._record(order)
                case Log(text):
                    self.say(text)
                case End(code):
                    self.stop(code)

    def _send(self, key: int, message: FromServer) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.send(message)

    def _record(self, record: Record) -> None:
        if self._log is None:
            return
        self._log.generation = record.generation
        try:
            self._log.emit(record.event, record.step, **record.fields)
        except OSError as error:
            # A full disk is no reason to stop a job that trains.
            self.say(f"an event of kind {record.event} could not be written: {error}")

    async def _store(self, generation: int) -> None:
        try:
            store = await asyncio.to_thread(self._open_store, self._host)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._do(lambda: self.membership.store_failed(self.now(), generation, why))
            return
        self._stores[generation] = store
        self._do(lambda: self.membership.store_opened(self.now(), generation, store.port))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.strangers.expire(self.now())
            self._do(lambda: self.membership.tick(self.now()))

    def _start_task(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


async def run_coordinator(coordinator: Coordinator, announce: Callable[[int], None]) -> int:
    """Serves until the job is over, or a signal ends it.

    Args:
        coordinator: Not started yet.
        announce: Called with the port, when it listens.

    Returns:
        The exit code.
    """
    loop = asyncio.get_running_loop()
    await coordinator.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _interrupt, coordinator, number)
    announce(coordinator.port)
    try:
        return await coordinator.serve()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await coordinator.close()


def _interrupt(coordinator: Coordinator, number: int) -> None:
    coordinator.say("stopped by a signal; members train on until their --coordinator-timeout")
    coordinator.stop(128 + number)


def _address(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror or error}; give an address of this machine"
        ) from error
    return str(found[0][4][0])


def _say_on_stderr(text: str) -> None:
    # A name from the network may hold anything that JSON can say.
    shown = text.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    print(f"{time.strftime('%H:%M:%S')} {shown}", file=sys.stderr, flush=True)
