"""The coordinator over real sockets, with clients that are only that."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from megatron_resilient import cli
from megatron_resilient.elastic.connection import Connection
from megatron_resilient.elastic.coordinator import Coordinator
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.messages import (
    Evidence,
    Exit,
    Fence,
    Finish,
    Hello,
    Ready,
    Seated,
    Stop,
)
from megatron_resilient.elastic.protocol import MAX_LINE_BYTES
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.world import HeldWorld
from megatron_resilient.errors import ConfigError, RefusedError
from megatron_resilient.telemetry import read_events

TOKEN = b"secret"
LIMITS = Limits(
    heartbeat_interval=0.1,
    heartbeat_timeout=30,
    fence_timeout=30,
    hang_timeout=0,
    join_window=0.2,
    rejoin_timeout=30,
)


class FakeStore:
    def __init__(self, host):
        self.port = 4242
        self.open = True

    def close(self):
        self.open = False


class Served:
    """A coordinator on a thread of its own."""

    def __init__(self, port=0, **options):
        self.said = []
        self._options = {"say": self.said.append, "open_store": FakeStore} | options
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(port)))
        self.code = None

    async def _serve(self, port):
        self._loop = asyncio.get_running_loop()
        self.coordinator = Coordinator(
            Rules(limits=LIMITS), "127.0.0.1", port, TOKEN, **self._options
        )
        await self.coordinator.start()
        self.port = self.coordinator.port
        self._started.set()
        try:
            self.code = await self.coordinator.serve()
        finally:
            await self.coordinator.close()

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(self, *error):
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self._loop.call_soon_threadsafe(self.coordinator.stop, 0)
        self._thread.join(15)
        assert not self._thread.is_alive()


OPENED = []


@pytest.fixture(autouse=True)
def close_connections():
    yield
    while OPENED:
        OPENED.pop().close()


class FakeWorker:
    def __init__(self, port, node, world=None, token=TOKEN, number=0):
        self.world = world
        held = None
        if world is not None:
            held = HeldWorld(
                generation=world.generation,
                formed=world.times["formed"],
                seats=world.seats,
                step=5,
                training=True,
            )
        self.hello = Hello("worker", node, f"process-{node}-{number}", world=held, pid=7)
        self.connection = Connection.connect("127.0.0.1", port, token, self.hello)
        OPENED.append(self.connection)

    def ready(self):
        state = {"generation": 0, "step": 0, "coordinate": None, "grid": [1, 1, 1]}
        after = self.world.generation if self.world else 0
        self.connection.send(Ready(state, {"min_nodes": 1}, after))

    def expect(self, kind):
        message = self.connection.receive(10)
        assert isinstance(message, kind), message
        if kind is Seated:
            self.world = message
        return message


def start(port, *names):
    workers = [FakeWorker(port, name) for name in names]
    for worker in workers:
        worker.ready()
    for worker in workers:
        worker.expect(Seated)
    return workers


def ask(port, *command, monkeypatch):
    monkeypatch.setenv("MEGATRON_RESILIENT_TOKEN", TOKEN.decode())
    return cli.main([*command, "--coordinator", f"127.0.0.1:{port}"])


def test_it_starts_without_torch():
    code = "import sys, megatron_resilient.elastic.coordinator as c; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_job_from_its_start_through_a_failure_to_its_end(tmp_path):
    with Served(run_dir=tmp_path) as served:
        one, two, three = start(served.port, "n0", "n1", "n2")
        assert [worker.world.rank for worker in (one, two, three)] == [0, 1, 2]
        assert (one.world.store_host, one.world.store_port) == ("127.0.0.1", 4242)
        two.connection.close()
        one.connection.send(Evidence(1, "a collective broke"))
        for worker in (one, three):
            worker.expect(Fence)
            worker.ready()
        for worker in (one, three):
            worker.expect(Seated)
        assert one.world.generation == 2
        assert one.world.lost_nodes == ("n1",)
        for worker in (one, three):
            worker.connection.send(Finish(0))
            worker.connection.close()
        served._thread.join(10)
        assert served.code == 0
    events = read_events(tmp_path)
    assert [e["member"] for e in events if e["event"] == "member_join"] == ["n0", "n1", "n2"]
    assert ["n1"] in [e["failed_nodes"] for e in events if e["event"] == "failure"]


def test_a_wrong_token_is_refused():
    with Served() as served:
        with pytest.raises(RefusedError, match="the token is not this job's"):
            FakeWorker(served.port, "n0", token=b"guess")
        start(served.port, "n0")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b'{"type":"ready","state":{},"settings":{}}\n',
        b'{"type":"hello"}\n',
        b"\n",
        b"[" * 90_000 + b"\n",
        b"x" * (MAX_LINE_BYTES + 2),
    ],
    ids=range(7),
)
def test_strangers_do_no_harm(sent):
    with Served() as served:
        (worker,) = start(served.port, "n0")
        with socket.create_connection(("127.0.0.1", served.port), 10) as stranger:
            with contextlib.suppress(OSError):  # closed before all was sent
                stranger.sendall(sent)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := stranger.recv(65536):
                    received += chunk
        assert served.said[-1].startswith("connection of 127.0.0.1:")
        assert received.count(b"\n") <= 2
        worker.connection.send(Evidence(1, "x"))
        worker.expect(Fence)


def test_strangers_that_say_nothing_are_closed_and_bounded(monkeypatch):
    monkeypatch.setattr("megatron_resilient.elastic.peer.HELLO_SECONDS", 0.3)
    monkeypatch.setattr("megatron_resilient.elastic.peer.MAX_STRANGERS", 5)
    with Served() as served:
        strangers = [socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(9)]
        for stranger in strangers:
            with stranger, stranger.makefile("rb") as lines:
                assert b"refused" in lines.read()
        assert not served.coordinator.strangers.peers
        assert served.coordinator.strangers.bytes == 0
        start(served.port, "n0")


def test_a_known_one_that_talks_nonsense_is_closed():
    with Served() as served:
        one, two = start(served.port, "n0", "n1")
        one.connection._socket.sendall(
            b'{"type":"worker_exit","local_rank":0,"status":0,"pid":1}\n'
        )
        assert "may not say" in one.connection.receive(5).error
        two.connection.send(Evidence(1, "x"))
        two.expect(Fence)


def test_training_goes_on_through_a_restart_at_the_same_port():
    with Served() as served:
        old = start(served.port, "n0", "n1")
        port = served.port
    with Served(port) as served:
        new = [FakeWorker(port, worker.hello.node, worker.world) for worker in old]
        for worker in new:
            worker.connection.send(Evidence(99, "of no generation"))
            assert worker.connection.receive(0.3) is None
        assert served.coordinator.membership.generation == 1
        stranger = FakeWorker(port, "n9", old[0].world)
        assert stranger.expect(Exit).error == "FencedError"
        new[0].connection.send(Evidence(1, "a collective broke"))
        for worker in new:
            worker.expect(Fence)
            worker.ready()
        for worker in new:
            worker.expect(Seated)
        # The old one may have announced number 2 to somebody.
        assert new[0].world.generation == 3


def test_a_store_that_cannot_be_started_is_tried_again(monkeypatch):
    monkeypatch.setattr("megatron_resilient.elastic.membership._STORE_PAUSE_SECONDS", 0.1)
    tries = []

    def open_store(host):
        tries.append(host)
        if len(tries) < 3:
            raise OSError("no port")
        return FakeStore(host)

    with Served(open_store=open_store) as served:
        start(served.port, "n0")
        assert tries[:3] == ["127.0.0.1"] * 3
        assert any("OSError: no port" in line for line in served.said)


def test_the_loop_answers_while_a_store_starts(monkeypatch, capsys):
    go = threading.Event()

    def open_store(host):
        assert go.wait(10)
        return FakeStore(host)

    with Served(open_store=open_store) as served:
        worker = FakeWorker(served.port, "n0")
        worker.ready()
        assert ask(served.port, "status", monkeypatch=monkeypatch) == 0
        go.set()
        worker.expect(Seated)


def test_a_fault_in_the_membership_ends_the_coordinator(monkeypatch):
    async def run():
        coordinator = Coordinator(
            Rules(limits=LIMITS), "127.0.0.1", 0, TOKEN, open_store=FakeStore, say=print
        )
        await coordinator.start()

        def broken(now):
            raise KeyError("fault")

        monkeypatch.setattr(coordinator.membership, "tick", broken)
        try:
            with pytest.raises(KeyError, match="fault"):
                await asyncio.wait_for(coordinator.serve(), 5)
        finally:
            await coordinator.close()

    asyncio.run(run())


def test_without_a_token_only_loopback_is_bound():
    for host in ("127.0.0.1", "localhost"):
        Coordinator(Rules(), host, 0, b"", open_store=FakeStore)
    with pytest.raises(ConfigError, match="MEGATRON_RESILIENT_TOKEN"):
        Coordinator(Rules(), "0.0.0.0", 0, b"", open_store=FakeStore)
    Coordinator(Rules(), "0.0.0.0", 0, TOKEN, open_store=FakeStore)


def test_status_and_leave(monkeypatch, capsys):
    with Served() as served:
        start(served.port, "n0", "n1")
        assert ask(served.port, "status", "--json", monkeypatch=monkeypatch) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["generation"] == 1
        assert [node["node"] for node in status["nodes"]] == ["n0", "n1"]
        assert [node["pids"] for node in status["nodes"]] == [[7], [7]]
        assert ask(served.port, "status", monkeypatch=monkeypatch) == 0
        shown = capsys.readouterr().out
        assert "training" in shown
        assert "n1" in shown
        assert ask(served.port, "leave", "--node-id", "n7", monkeypatch=monkeypatch) == 2
        assert "no node 'n7'; there are: n0, n1" in capsys.readouterr().err
        agent = Connection.connect(
            "127.0.0.1", served.port, TOKEN, Hello("agent", "n8", "agent-of-n8")
        )
        OPENED.append(agent)
        time.sleep(0.5)  # past the first moments, in which nobody is let go
        assert ask(served.port, "leave", "--node-id", "n8", monkeypatch=monkeypatch) == 0
        assert agent.receive(5) == Stop(0)


def test_no_coordinator_is_a_named_error(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ask(port, "status", monkeypatch=monkeypatch) == 2
    assert f"no coordinator at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("nnodes", ["0", "x", "3:2", "2:", ":2"])
def test_a_wrong_number_of_nodes_is_named(nnodes, capsys):
    assert cli.main(["coordinator", "--nnodes", nnodes]) == 2
    assert f"--nnodes {nnodes}" in capsys.readouterr().err.replace("'", "")
