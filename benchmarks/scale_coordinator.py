"""What a job of N nodes costs its coordinator: the real process, over real sockets.

Nothing of what the coordinator does is simulated: its process, the wire, the store.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import psutil

from benchmarks.scale_members import GRID, SETTINGS, TOKEN, Swarm, beat, kept_state
from megatron_resilient.elastic.connection import Connection
from megatron_resilient.elastic.messages import (
    CLIENT,
    Answer,
    Beat,
    Evidence,
    Fence,
    Hello,
    Ready,
    Seated,
    StatusQuery,
)
from megatron_resilient.elastic.protocol import TOKEN_VARIABLE, encode
from megatron_resilient.elastic.world import HeldWorld, Seat


class RealCoordinator:
    """A coordinator process of the command line, and how much processor time it took."""

    def __init__(self, *flags: str) -> None:
        """Starts it on a free port."""
        command = [f"{sys.prefix}/bin/megatron-resilient", "coordinator", "--port", "0"]
        environment = os.environ | {TOKEN_VARIABLE: TOKEN.decode(), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])
        self._seen = psutil.Process(self._process.pid)

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds so far."""
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    @property
    def resident_bytes(self) -> int:
        """Memory that it has now."""
        return int(self._seen.memory_info().rss)

    def idle(self, swarm: Swarm, limit_seconds: float = 60.0) -> None:
        """Waits until it has caught up: until it takes less than half of a core."""
        until = time.monotonic() + limit_seconds
        while time.monotonic() < until:
            before, began = self.cpu_seconds, time.monotonic()
            while time.monotonic() - began < 0.4:
                swarm.pump(0.05)
            if self.cpu_seconds - before < 0.5 * (time.monotonic() - began):
                return
        raise TimeoutError(f"the coordinator is busy after {limit_seconds:.0f} s still")

    def status(self) -> tuple[dict[str, object], float]:
        """Asks for the status; returns it and the seconds until the answer."""
        hello = Hello(CLIENT, "", "client-of-benchmark")
        with Connection.connect("127.0.0.1", self.port, TOKEN, hello, 60) as connection:
            began = time.perf_counter()
            connection.send(StatusQuery())
            answer = connection.receive(120)
            assert isinstance(answer, Answer)
            return answer.body, time.perf_counter() - began

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Cost:
    """What something took.

    Attributes:
        cpu_seconds: Of the coordinator.
        seconds: On the clock, from the first word to the last answer.
        bytes: Of one line that was sent or received.
    """

    cpu_seconds: float
    seconds: float
    bytes: float = 0.0


def measure(nodes: int, local_world: int, beat_seconds: float = 4.0) -> dict[str, Cost]:
    """Returns what a job of so many nodes costs its coordinator.

    Args:
        nodes: Nodes.
        local_world: Workers of each.
        beat_seconds: For so long everybody beats once a second.

    Returns:
        connect, idle second, start, beat, fence, form, status; `idle` and `beat` are per second and
        per heartbeat, the others for all members together.
    """
    members = nodes * local_world
    coordinator = RealCoordinator(
        *("--nnodes", f"1:{nodes}", "--heartbeat-timeout", "100", "--fence-timeout", "200"),
        *("--hang-timeout", "0", "--join-window", "1"),
    )
    swarm = Swarm(coordinator.port)
    costs: dict[str, Cost] = {}
    try:
        time.sleep(3.5)  # a coordinator that is young waits for members of a job that lives
        with _Timed(coordinator, costs, "connect"):
            swarm.connect(nodes, local_world)
        coordinator.idle(swarm)
        before, began = coordinator.cpu_seconds, time.monotonic()
        while time.monotonic() - began < 2:
            swarm.pump(0.1)
        idle = (coordinator.cpu_seconds - before) / (time.monotonic() - began)
        costs["idle"] = Cost(idle, 1.0)
        first = {"generation": 0, "coordinate": None, "grid": GRID}
        seats = members // GRID[2] * GRID[2]
        with _Timed(coordinator, costs, "start"):
            for worker in swarm.workers:
                swarm.say(worker, Ready(first, SETTINGS, 0))
                swarm.pump()
            swarm.wait_told(Seated.TYPE, seats)
        costs["start"] = _with_bytes(costs["start"], swarm, Seated.TYPE)
        coordinator.idle(swarm)
        costs["beat"] = _beats(coordinator, swarm, beat_seconds)
        costs["status"] = Cost(0.0, coordinator.status()[1])
        with _Timed(coordinator, costs, "fence"):
            swarm.say(swarm.workers[0], Evidence(1, "a collective broke"))
            swarm.wait_told(Fence.TYPE, seats)
        costs["fence"] = _with_bytes(costs["fence"], swarm, Fence.TYPE)
        swarm.told.clear()
        swarm.told_bytes.clear()
        with _Timed(coordinator, costs, "form"):
            for rank, worker in enumerate(swarm.workers):
                swarm.say(worker, Ready(kept_state(rank, members), SETTINGS, 1))
                swarm.pump()
            swarm.wait_told(Seated.TYPE, seats)
        costs["form"] = _with_bytes(costs["form"], swarm, Seated.TYPE)
        costs["memory"] = Cost(0.0, 0.0, coordinator.resident_bytes)
    finally:
        swarm.close()
        coordinator.close()
    return costs


def take_over(nodes: int, local_world: int) -> float:
    """Returns seconds until a new coordinator has all members of a job back.

    Args:
        nodes: Nodes.
        local_world: Workers of each.
    """
    coordinator = RealCoordinator("--heartbeat-timeout", "100", "--fence-timeout", "200")
    swarm = Swarm(coordinator.port)
    seats = tuple(Seat(f"node{n}", rank, {}) for n in range(nodes) for rank in range(local_world))
    try:
        began = time.perf_counter()
        swarm.connect(nodes, local_world, HeldWorld(5, 1.5, seats, 123456, True))
        seconds = time.perf_counter() - began
        phase = coordinator.status()[0]["phase"]
        assert phase == "training", phase
    finally:
        swarm.close()
        coordinator.close()
    return seconds


def _beats(coordinator: RealCoordinator, swarm: Swarm, seconds: float) -> Cost:
    """Everybody beats once a second, evenly spread; returns the cost of one heartbeat."""
    before_idle = coordinator.cpu_seconds
    began = time.monotonic()
    while time.monotonic() - began < 1:
        swarm.pump(0.1)
    idle = (coordinator.cpu_seconds - before_idle) / (time.monotonic() - began)
    lines = [(each, encode(beat())) for each in swarm.workers]
    lines += [(each, encode(Beat())) for each in swarm.agents]
    before, began, said = coordinator.cpu_seconds, time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(passed * len(lines))
        while said < due:
            client, line = lines[said % len(lines)]
            swarm.say_line(client, line)
            said += 1
        swarm.pump(0.001)
    coordinator.idle(swarm)
    wall = time.monotonic() - began
    spent = coordinator.cpu_seconds - before - idle * wall
    return Cost(spent / said, wall, sum(len(line) for _, line in lines) / len(lines))


def _with_bytes(cost: Cost, swarm: Swarm, kind: str) -> Cost:
    return replace(cost, bytes=swarm.told_bytes[kind] / swarm.told[kind])


class _Timed:
    """Notes what a block costs."""

    def __init__(self, coordinator: RealCoordinator, costs: dict[str, Cost], name: str) -> None:
        self._coordinator, self._costs, self._name = coordinator, costs, name

    def __enter__(self) -> None:
        self._cpu, self._began = self._coordinator.cpu_seconds, time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._costs[self._name] = Cost(
            self._coordinator.cpu_seconds - self._cpu, time.perf_counter() - self._began
        )
