"""A connection to the coordinator that comes back by itself, for a loop that must never block."""

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Collection

from megatron_resilient.elastic.connection import Connection
from megatron_resilient.elastic.messages import FromServer, Hello, ToServer
from megatron_resilient.errors import ProtocolError, RefusedError

_CONNECT_SECONDS = 5.0
_SEND_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


class Link:
    """Keeps one connection open; `wait` is the only place where its owner's loop rests.

    All methods but `wake` belong to the thread that owns the loop. Attempts to connect run on
    threads of their own: resolving a name can take longer than a heartbeat may.

    Attributes:
        connections: how many connections were made so far. When it grows, what the coordinator
            must know has to be said again.
        last_error: what stood in the way of the last attempt; empty if nothing did.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        hello: Callable[[], Hello],
        silence_seconds: float,
    ) -> None:
        """Connects at the first `wait`.

        Args:
            host: the coordinator's host.
            port: its port.
            token: the job's secret.
            hello: says who this is, at each attempt anew.
            silence_seconds: unacknowledged data of that age breaks the connection.
        """
        self.connections = 0
        self.last_error = ""
        self._host, self._port, self._token = host, port, token
        self._hello = hello
        self._silence_seconds = silence_seconds
        self._connection: Connection | None = None
        self._attempt: _Attempt | None = None
        self._pause = 0.0
        self._next_attempt = 0.0
        self._away_until = 0.0
        self._lost_at = time.monotonic()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether the coordinator is there."""
        return self._connection is not None

    @property
    def is_quiet(self) -> bool:
        """Whether no thread is about to connect: only then may the process fork."""
        return self._attempt is None

    @property
    def absent_seconds(self) -> float:
        """How long the coordinator has been away; 0 while it is there."""
        return 0.0 if self._connection is not None else time.monotonic() - self._lost_at

    @property
    def address(self) -> str:
        """The coordinator's address, for messages."""
        return f"{self._host}:{self._port}"

    def inode(self) -> int | None:
        """Returns the inode of the connection's socket, None without one. For any thread."""
        connection = self._connection
        if connection is None:
            return None
        with contextlib.suppress(OSError):  # closed meanwhile
            return os.fstat(connection.fileno()).st_ino
        return None

    def wake(self) -> None:
        """Ends the owner's `wait` at once. For any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # woken already, or closed
            self._waker.send(b"\0")

    def keep_away(self, seconds: float) -> None:
        """Has the link broken for so long, as if the network were cut. For any thread."""
        self._away_until = time.monotonic() + seconds
        self.wake()

    def wait(
        self, timeout_seconds: float, others: Collection[int] = ()
    ) -> tuple[list[FromServer], set[int]]:
        """Rests until something happens.

        Args:
            timeout_seconds: at most so long.
            others: further descriptors to look at.

        Returns:
            The messages that came, and which of `others` can be read (or are closed).

        Raises:
            RefusedError: the coordinator does not want this process.
        """
        self._connect()
        poll = select.poll()
        for descriptor in (self._woken.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection.fileno(), select.POLLIN)
        elif self._attempt is None:
            timeout_seconds = min(timeout_seconds, self._next_attempt - time.monotonic())
        ready = {fd for fd, _ in poll.poll(max(0.0, timeout_seconds) * 1000)}
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        self._connect()
        return self._receive(), ready.intersection(others)

    def send(self, message: ToServer) -> bool:
        """Sends a message, if the coordinator is there.

        Returns:
            Whether it was sent; whether it arrived is not known.
        """
        if self._connection is None:
            return False
        try:
            self._connection.send(message, _SEND_SECONDS)
        except OSError as error:
            self._lose(error)
            return False
        return True

    def abandon(self) -> None:
        """Closes our descriptors of the link in a forked child; the parent's go on."""
        for sock in (self._woken, self._waker):
            sock.close()
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    def close(self) -> None:
        """Ends the connection; the link is not used any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._woken.close()
        self._waker.close()

    def _receive(self) -> list[FromServer]:
        messages: list[FromServer] = []
        while self._connection is not None:
            try:
                message = self._connection.receive(0)
            except (OSError, ProtocolError) as error:
                self._lose(error)
                break
            if message is None:
                break
            messages.append(message)
        return messages

    def _connect(self) -> None:
        """Takes over a connection that was made, or starts the next attempt when it is time."""
        if time.monotonic() < self._away_until:
            if self._connection is not None:
                self._lose(ConnectionAbortedError("the connection was cut on purpose"))
            self._next_attempt = self._away_until
            return
        if self._connection is not None:
            return
        attempt = self._attempt
        if attempt is None:
            if time.monotonic() >= self._next_attempt:
                self._attempt = _Attempt(
                    self._host, self._port, self._token, self._hello(), self.wake
                )
            return
        if not attempt.done.is_set():
            return
        self._attempt = None
        if attempt.connection is not None:
            self._connection = attempt.connection
            self._break_on_silence(attempt.connection)
            self.connections += 1
            self._pause, self.last_error = 0.0, ""
            return
        if isinstance(attempt.error, RefusedError):
            raise attempt.error
        self._back_off(attempt.error)

    def _lose(self, error: Exception) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._lost_at = time.monotonic()
        self._back_off(error)

    def _back_off(self, error: Exception | None) -> None:
        self.last_error = str(error)
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        # Not all members of a large job at once.
        self._next_attempt = time.monotonic() + self._pause * random.uniform(0.5, 1.0)

    def _break_on_silence(self, connection: Connection) -> None:
        # A cut cable says nothing: without this the kernel would go on trying for minutes.
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            milliseconds = int(self._silence_seconds * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class _Attempt:
    """One attempt to connect, on a thread of its own."""

    def __init__(
        self, host: str, port: int, token: bytes, hello: Hello, wake: Callable[[], None]
    ) -> None:
        self.done = threading.Event()
        self.connection: Connection | None = None
        self.error: Exception | None = None
        self._arguments = (host, port, token, hello, _CONNECT_SECONDS)
        self._wake = wake
        threading.Thread(target=self._run, name="resilient-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self.connection = Connection.connect(*self._arguments)
        except (OSError, ProtocolError, RefusedError) as error:
            self.error = error
        finally:
            self.done.set()
            self._wake()
