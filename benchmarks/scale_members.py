"""Simulated members of a job, as many as this machine has sockets for, in one thread.

They are sockets and counters: they prove the token, say what they are told to say, and count what
they are told.
"""

import json
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_resilient.elastic.messages import (
    AGENT,
    WORKER,
    Beat,
    Hello,
    ToServer,
)
from megatron_resilient.elastic.protocol import encode, new_nonce, sign
from megatron_resilient.elastic.world import HeldWorld

TOKEN = b"a token of the benchmark"
GRID = [1, 1, 16]  # tensor, context, pipeline
SETTINGS = {"min_nodes": 1, "flags_digest": "0" * 64}
REPORT = {"step": 123456, "loss": 2.345678, "tokens_per_second": 1234567.8, "imbalance": 1.03}
_AT_ONCE = 500  # connections on their way: the coordinator takes some 1,000 strangers
_PATIENCE_SECONDS = 200.0


def beat() -> Beat:
    """Returns a heartbeat as a worker says it in training."""
    report = REPORT | {"guaranteed_losses": 1}
    return Beat(generation=1, progress=123456, busy=0.8123, report=report)


def kept_state(rank: int, ranks: int) -> dict[str, object]:
    """Returns what a survivor says of itself: fields of `OldState.to_json`, plausible values."""
    progress = {
        "step": 123456,
        "consumed_train_samples": 1896284160,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 1234567,
        "scheduler_steps": 1896284160,
        "flops": 1.234567890123e24,
        "loss_scale": {},
    }
    # Every rank measures its own seconds, so no two states are equal.
    outcome = {"losses": {"lm loss": 2.3456789}, "skipped": False, "seconds": 12.3 + rank / 7919}
    return {
        "generation": 1,
        "coordinate": [rank * GRID[2] // max(ranks, 1), 0],
        "step": 123456,
        "ready": False,
        "begun": True,
        "progress": progress,
        "outcome": outcome,
        "grid": GRID,
    }


@dataclass(eq=False)
class _Client:
    """One socket.

    Attributes:
        hello: Unsigned.
        sock: The connection.
        head: The beginning of the line that comes in.
        line_bytes: How much of it came.
        unsent: What the socket did not take yet.
        welcome: Whether it is known.
    """

    hello: Hello
    sock: socket.socket
    head: bytearray = field(default_factory=bytearray)
    line_bytes: int = 0
    unsent: bytearray = field(default_factory=bytearray)
    welcome: bool = False


class Swarm:
    """The members of `nodes` nodes, in this process, on one thread.

    Attributes:
        workers: Those with a rank.
        agents: One a node.
        told: Lines by kind.
        told_bytes: Bytes by kind.
        closed: Connections that the coordinator ended.
    """

    def __init__(self, port: int) -> None:
        self.workers: list[_Client] = []
        self.agents: list[_Client] = []
        self.told: Counter[str] = Counter()
        self.told_bytes: Counter[str] = Counter()
        self.closed = 0
        self._port = port
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, _Client] = {}
        self._known = 0

    def connect(self, nodes: int, local_world: int, held: HeldWorld | None = None) -> None:
        """Connects an agent and `local_world` workers for each node, and waits for all welcomes.

        Args:
            nodes: Nodes.
            local_world: Workers of each.
            held: The world in which the workers say that they are: they come back.
        """
        hellos = [
            Hello(
                role,
                f"node{node}",
                f"{role}-{node:06d}-{rank}",
                rank,
                size,
                4000 + rank,
                held if role == WORKER else None,
            )
            for node in range(nodes)
            for role, rank, size in [
                (AGENT, 0, local_world),
                *((WORKER, rank, local_world) for rank in range(local_world)),
            ]
        ]
        for begun, hello in enumerate(hellos):
            self._wait(lambda begun=begun: begun - self._known < _AT_ONCE)
            client = _Client(hello, socket.create_connection(("127.0.0.1", self._port), 20))
            client.sock.setblocking(False)
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._by_descriptor[client.sock.fileno()] = client
            self._epoll.register(client.sock.fileno(), select.EPOLLIN)
            (self.agents if hello.role == AGENT else self.workers).append(client)
        self._wait(lambda: self._known == len(hellos))

    def say(self, client: _Client, message: ToServer) -> int:
        """Sends; returns the bytes of the line."""
        return self.say_line(client, encode(message))

    def say_line(self, client: _Client, line: bytes) -> int:
        """Sends a line that is encoded already; returns its bytes."""
        if client.unsent:
            client.unsent += line
            return len(line)
        try:
            sent = client.sock.send(line)
        except BlockingIOError:
            sent = 0
        if sent < len(line):
            client.unsent += line[sent:]
            self._epoll.modify(client.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return len(line)

    def wait_told(self, kind: str, count: int) -> None:
        """Waits until so many lines of a kind came, over all."""
        self._wait(lambda: self.told[kind] >= count)

    def pump(self, seconds: float = 0.0) -> None:
        """Takes in what is there, waiting at most so long for the first of it."""
        for descriptor, event in self._epoll.poll(seconds, 4096):
            client = self._by_descriptor[descriptor]
            if event & select.EPOLLOUT:
                self._send_rest(client)
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._receive(client)

    def drop(self, client: _Client) -> None:
        """Ends a connection, as a process that is killed does."""
        self._epoll.unregister(client.sock.fileno())
        del self._by_descriptor[client.sock.fileno()]
        client.sock.close()

    def close(self) -> None:
        """Ends all connections."""
        for client in list(self._by_descriptor.values()):
            self.drop(client)
        self._epoll.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if self.closed:
                raise RuntimeError(f"the coordinator closed {self.closed} connections")
            if time.monotonic() > until:
                raise TimeoutError(f"not within {_PATIENCE_SECONDS:.0f} s; told {dict(self.told)}")
            self.pump(0.05)

    def _send_rest(self, client: _Client) -> None:
        try:
            sent = client.sock.send(client.unsent)
        except BlockingIOError:
            return
        del client.unsent[:sent]
        if not client.unsent:
            self._epoll.modify(client.sock.fileno(), select.EPOLLIN)

    def _receive(self, client: _Client) -> None:
        try:
            chunk = client.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            chunk = b""
        if not chunk:
            self.closed += 1
            self.drop(client)
            return
        *ends, rest = chunk.split(b"\n")
        for part in ends:
            self._take(client, part)
            self._line(client)
        self._take(client, rest)

    def _take(self, client: _Client, part: bytes) -> None:
        client.line_bytes += len(part)
        if len(client.head) < 200:
            client.head += part[:200]

    def _line(self, client: _Client) -> None:
        head, size = bytes(client.head), client.line_bytes + 1
        client.head.clear()
        client.line_bytes = 0
        kind = head.split(b'"', 4)[3].decode()  # {"type":"KIND"
        self.told[kind] += 1
        self.told_bytes[kind] += size
        if kind == "challenge":
            nonce = json.loads(head)["nonce"]
            hello = Hello(**{**vars(client.hello), "nonce": new_nonce()})
            self.say(client, sign(hello, nonce, TOKEN))
        elif kind == "welcome":
            client.welcome = True
            self._known += 1
