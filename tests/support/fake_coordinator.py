"""A coordinator that decides nothing: tests read what came and say what goes out."""

import contextlib
import socket
import threading
import time

from megatron_resilient.elastic.messages import (
    Challenge,
    FromServer,
    Hello,
    Refused,
    Seated,
    Welcome,
)
from megatron_resilient.elastic.protocol import (
    encode,
    is_signed,
    parse_to_server,
    welcome_mac,
)
from megatron_resilient.elastic.world import Seat

TOKEN = b"a secret of the tests"
PATIENCE_SECONDS = 20.0


class FakeCoordinator:
    """Listens on loopback; one thread a connection.

    Attributes:
        received: all messages as (hello of their sender, message), in order.
    """

    def __init__(self, port: int = 0) -> None:
        self.received: list = []
        self.hellos: list[Hello] = []
        self._sockets: dict[str, socket.socket] = {}
        self._changed = threading.Condition()
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def send(self, message: FromServer, to: Hello | None = None) -> None:
        """Sends to one, by default to the last that came."""
        self._sockets[(to or self.hellos[-1]).id].sendall(encode(message))

    def wait_for(self, kind: type, after: int = 0, count: int = 1, **fields):
        """Returns the first message (or hello) of that kind and with those fields."""
        found: list = []

        def there() -> bool:
            source = self.hellos if kind is Hello else [m for _, m in self.received]
            found[:] = [
                m
                for m in source[after:]
                if type(m) is kind and all(getattr(m, k) == v for k, v in fields.items())
            ]
            return len(found) >= count

        with self._changed:
            assert self._changed.wait_for(there, PATIENCE_SECONDS), (kind, self.received[-5:])
        return found[count - 1]

    def drop_all(self) -> None:
        """Ends all connections."""
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Is gone, as if killed."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock, sock.makefile("rb") as lines:
            sock.sendall(encode(Challenge("nonce")))
            hello = parse_to_server(lines.readline())
            if not is_signed(hello, "nonce", TOKEN):
                sock.sendall(encode(Refused("another token")))
                return
            sock.sendall(encode(Welcome(welcome_mac(hello, TOKEN))))
            with self._changed:
                self._sockets[hello.id] = sock
                self.hellos.append(hello)
                self._changed.notify_all()
            for line in lines:
                with self._changed:
                    self.received.append((hello, parse_to_server(line)))
                    self._changed.notify_all()


def world(generation: int, *nodes: str, rank: int = 0) -> Seated:
    """Returns the order that seats one worker on each node."""
    return Seated(
        generation=generation,
        seats=tuple(Seat(node, 0, {"step": 3}) for node in nodes or ("node0",)),
        rank=rank,
        store_host="127.0.0.1",
        store_port=1,
        cause="start",
        lost_nodes=(),
        joined_nodes=nodes,
        planned=False,
        times={"formed": time.time()},
    )
