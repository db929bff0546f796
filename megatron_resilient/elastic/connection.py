"""The client's side of a connection to the coordinator; blocking, for use from any thread."""

import hmac
import select
import socket
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from megatron_resilient.elastic.messages import (
    Challenge,
    FromServer,
    Hello,
    Refused,
    ToServer,
    Welcome,
)
from megatron_resilient.elastic.protocol import (
    MAX_LINE_BYTES,
    encode,
    new_nonce,
    parse_from_server,
    sign,
    welcome_mac,
)
from megatron_resilient.errors import ProtocolError, RefusedError

_READ_BYTES = 1 << 16


class Connection:
    """A connection whose hello was accepted. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._received = bytearray()
        self._searched = 0

    @classmethod
    def connect(
        cls, host: str, port: int, token: bytes, hello: Hello, timeout_seconds: float = 5.0
    ) -> Self:
        """Connects and says hello.

        Args:
            host: The coordinator's host.
            port: Its port.
            token: The shared token; empty for none.
            hello: Who this is; `nonce` and `mac` are filled in here.
            timeout_seconds: For all of it together.

        Raises:
            RefusedError: The coordinator does not want this process, or does not know the token.
            ProtocolError: What answers is no coordinator.
            OSError: It cannot be reached, or does not answer in time: worth another try.
        """
        deadline = time.monotonic() + timeout_seconds
        sock = socket.create_connection((host, port), timeout_seconds)
        connection = cls(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = f"the coordinator {host}:{port}"
            challenge = connection._await_answer(deadline, address)
            if not isinstance(challenge, Challenge):
                raise ProtocolError(
                    f"{address} does not begin with a challenge; is it another port?"
                )
            signed = sign(replace(hello, nonce=new_nonce()), challenge.nonce, token)
            connection.send(signed)
            welcome = connection._await_answer(deadline, address)
            if isinstance(welcome, Refused):
                raise RefusedError(f"{address} refuses this {hello.role}: {welcome.error}")
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"{address} answers a hello with {welcome.TYPE!r}")
            if not hmac.compare_digest(welcome.mac, welcome_mac(signed, token)):
                raise RefusedError(f"{address} does not know our token; is it another job's?")
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, message: ToServer, timeout_seconds: float = 10.0) -> None:
        """Sends one message.

        Raises:
            OSError: The connection is broken, or its peer did not read for so long.
            ProtocolError: The message cannot be sent.
        """
        line = encode(message)
        with self._sending:
            self._socket.settimeout(timeout_seconds)
            self._socket.sendall(line)

    def receive(self, timeout_seconds: float | None = None) -> FromServer | None:
        """Returns the next message; None if none came in time.

        Args:
            timeout_seconds: How long to wait; 0 does not wait, None waits for ever.

        Raises:
            ConnectionError: The connection is closed.
            ProtocolError: What came is no message.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            end = self._received.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                self._searched = 0
                return parse_from_server(line)
            self._searched = len(self._received)
            if self._searched > MAX_LINE_BYTES:
                raise ProtocolError(f"the coordinator sends a line of over {MAX_LINE_BYTES} bytes")
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._is_readable(left):
                return None
            chunk = self._socket.recv(_READ_BYTES)
            if not chunk:
                raise ConnectionResetError("the coordinator closed the connection")
            self._received += chunk

    def fileno(self) -> int:
        """Returns the socket's descriptor, for `select`. Lines may be buffered: see `receive`."""
        return self._socket.fileno()

    def abandon(self) -> None:
        """Closes the descriptor, but not the connection: a forked child leaves it to its parent."""
        self._socket.close()

    def close(self) -> None:
        """Closes the connection; a thread that waits in `receive` gets a ConnectionError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            pass
        finally:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_readable(self, timeout_seconds: float | None) -> bool:
        # poll, not select: a trainer may have more than 1024 files open.
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError as error:  # closed by another thread
            raise ConnectionAbortedError("this connection was closed") from error
        return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))

    def _await_answer(self, deadline: float, address: str) -> FromServer:
        answer = self.receive(max(0.0, deadline - time.monotonic()))
        if answer is None:
            raise TimeoutError(f"{address} did not answer in time")
        return answer
