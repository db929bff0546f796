"""The server's side of one connection: strangers stay outside, whatever they send."""

import asyncio
import socket
from typing import TYPE_CHECKING

from megatron_resilient.elastic.messages import Challenge, FromServer, Hello, Refused, Welcome
from megatron_resilient.elastic.protocol import (
    MAX_LINE_BYTES,
    encode_parts,
    is_signed,
    new_nonce,
    parse_to_server,
    welcome_mac,
)
from megatron_resilient.errors import ProtocolError

if TYPE_CHECKING:
    from megatron_resilient.elastic.coordinator import Coordinator

HELLO_SECONDS = 5.0
MAX_STRANGERS = 1024
MAX_STRANGER_BYTES = 16 * MAX_LINE_BYTES
# A stopped process reads nothing. What waits for it is bounded too.
_MAX_UNSENT_BYTES = 8 * MAX_LINE_BYTES


class Strangers:
    """Connections without an accepted hello: bounded in number, in bytes and in time.

    Attributes:
        peers: Those there are.
        bytes: What they have sent and we hold, all together.
    """

    def __init__(self) -> None:
        self.peers: set[Peer] = set()
        self.bytes = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        return len(self.peers) > MAX_STRANGERS or self.bytes > MAX_STRANGER_BYTES

    def add(self, peer: "Peer") -> None:
        """Adds one."""
        self.peers.add(peer)

    def drop(self, peer: "Peer") -> None:
        """Forgets one, if it is one."""
        if peer in self.peers:
            self.peers.discard(peer)
            self.bytes -= peer.counted_bytes

    def count(self, peer: "Peer", received_bytes: int) -> None:
        """Adds to what one of them has sent."""
        peer.counted_bytes += received_bytes
        self.bytes += received_bytes

    def expire(self, now: float) -> None:
        """Closes those that said no hello in time."""
        for peer in [peer for peer in self.peers if now - peer.since > HELLO_SECONDS]:
            peer.refuse("no hello in time")


class Peer(asyncio.Protocol):
    """One connection.

    Attributes:
        hello: What it said, once that was accepted.
        since: When it connected.
        own_host: Our address, as the peer sees it.
        counted_bytes: What it sent while it was a stranger.
    """

    def __init__(self, coordinator: "Coordinator") -> None:
        self.hello: Hello | None = None
        self.since = coordinator.now()
        self.own_host = ""
        self.counted_bytes = 0
        self._coordinator = coordinator
        self._key: int | None = None
        self._nonce = new_nonce()
        self._received = bytearray()
        self._searched = 0
        self._closing = False
        self._transport: asyncio.Transport | None = None
        self._name = "?"

    @property
    def role(self) -> str:
        """The role that it has, or empty."""
        return self.hello.role if self.hello else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A stranger connects."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        name, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._name = f"{name[0]}:{name[1]}" if name else "?"
        self.own_host = own[0] if own else ""
        self._coordinator.strangers.add(self)
        if self._coordinator.strangers.full:
            self.refuse("too many connections without a hello")
        else:
            self.send(Challenge(self._nonce))

    def data_received(self, data: bytes) -> None:
        """Bytes come in, in any pieces."""
        if self._closing:
            return
        self._received += data
        if self.hello is None:
            self._coordinator.strangers.count(self, len(data))
            if self._coordinator.strangers.full:
                self.refuse("too much from those without a hello")
                return
        try:
            while not self._closing and (line := self._next_line()) is not None:
                if self._key is None:
                    self._greet(line)
                else:
                    self._coordinator.heard(self._key, line)
        except ProtocolError as error:
            self.refuse(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._closing = True
        self._coordinator.strangers.drop(self)
        if self._key is not None:
            self._coordinator.lost(self._key, exc)

    def send(self, message: FromServer) -> None:
        """Sends a message when the peer reads."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.writelines(encode_parts(message))
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._coordinator.say(f"{self._name} does not read what it is sent: closed")
            self.abort()

    def refuse(self, why: str) -> None:
        """Says why, and closes."""
        if not self._closing:
            self._coordinator.say(f"connection of {self._describe()} closed: {why}")
            self.send(Refused(why))
            self.close()

    def close(self) -> None:
        """Closes when all is sent, or when that takes too long."""
        self._closing = True
        self._received.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(HELLO_SECONDS, self._transport.abort)

    def abort(self) -> None:
        """Closes at once."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def _next_line(self) -> bytes | None:
        end = self._received.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._received)
            if self._searched > MAX_LINE_BYTES:
                raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line

    def _greet(self, line: bytes) -> None:
        hello = parse_to_server(line)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{hello.TYPE!r} before a hello")
        token = self._coordinator.token
        if not is_signed(hello, self._nonce, token):
            raise ProtocolError("the token is not this job's")
        self.hello = hello
        self._coordinator.strangers.drop(self)
        self.send(Welcome(welcome_mac(hello, token)))
        self._key = self._coordinator.admitted(self)

    def _describe(self) -> str:
        if self.hello is None:
            return self._name
        return f"{self.hello.role} {self.hello.node} at {self._name}"
