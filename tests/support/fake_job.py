"""A whole job around the pure membership: workers, agents and a network, without any of them.

Time is a number; messages wait in queues, and every step delivers some of them in a random order.
The fakes assert what no worker may ever see.
"""

import random
from dataclasses import dataclass, field

from megatron_resilient.elastic.limits import Limits
from megatron_resilient.elastic.membership import Membership
from megatron_resilient.elastic.messages import (
    AGENT,
    WORKER,
    Beat,
    BoundaryOrder,
    Evidence,
    Exit,
    Fence,
    Finish,
    Hello,
    Leave,
    Paused,
    Ready,
    Seated,
    Stop,
    Whereabouts,
    WhereQuery,
    WorkerExit,
)
from megatron_resilient.elastic.orders import Close, End, OpenStore, Record, Send
from megatron_resilient.elastic.protocol import (
    encode,
    parse_from_server,
    parse_to_server,
)
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.world import HeldWorld

STEP_SECONDS = 0.1
LIMITS = Limits(
    heartbeat_interval=0.5,
    heartbeat_timeout=2.0,
    fence_timeout=4.0,
    hang_timeout=8.0,
    join_window=1.0,
    rejoin_timeout=10.0,
)


@dataclass(eq=False)
class Wire:
    """One connection, as the network sees it."""

    key: int
    client: "Worker | Agent"
    to_server: list = field(default_factory=list)
    to_client: list = field(default_factory=list)
    closing: bool = False


@dataclass(eq=False)
class Worker:
    node: str
    local_rank: int
    local_world: int
    id: str
    pid: int
    alive: bool = True
    stopped: bool = False
    stuck: bool = False  # the main thread does not hear of a fence
    wire: Wire | None = None
    world: Seated | None = None
    generation: int = 0  # of its state
    step: int = 0
    fenced: bool = False
    waiting: bool = True
    bits: int = 0
    leaving: tuple = ()
    standing: list = field(default_factory=list)
    told: Exit | None = None
    next_beat: float = 0.0
    progress: int = 0
    in_collective: bool = True
    frozen: bool = False  # no progress
    handed_over: bool = False  # what it holds, to those that stay
    gives: bool = False  # the same, having no seat

    @property
    def slot(self):
        return self.node, self.local_rank

    @property
    def trains(self):
        return self.alive and self.world is not None and not self.fenced and not self.waiting


@dataclass(eq=False)
class Agent:
    node: str
    id: str
    pid: int
    alive: bool = True
    restarts: int = 3
    leaving: bool = False
    stopped: bool = False
    wire: Wire | None = None
    restart_at: float | None = None
    next_beat: float = 0.0
    code: int | None = None
    stop_at: float = 0.0
    unsaid: list = field(default_factory=list)


class FakeJob:
    def __init__(
        self,
        nodes=3,
        local_world=1,
        grid=(1, 1, 1),
        min_nodes=1,
        seed=0,
        limits=LIMITS,
        crowded=False,  # the coordinator often has more to read before it decides
    ):
        self.now = 1000.0
        self.grid, self.local_world = list(grid), local_world
        self.settings = {"min_nodes": min_nodes, "flags_digest": "d"}
        self.random = random.Random(seed)
        self.crowd = random.Random(seed) if crowded else None
        self.rules = Rules(limits=limits)
        self.counter = 0
        self.workers: list[Worker] = []
        self.agents: dict[str, Agent] = {}
        self.wires: dict[int, Wire] = {}
        self.cut: set[str] = set()
        self.stores: list[tuple[float, int]] = []
        self.events: list[Record] = []
        self.end: End | None = None
        self.worlds: dict[int, Seated] = {}
        self.machine = Membership(self.rules, self.now)
        self.coordinator_up = True
        for number in range(nodes):
            self.start_node(f"n{number}")

    # What may happen.

    def start_node(self, node):
        old = self.agents.get(node)
        if old is not None and old.alive:
            return
        self.agents[node] = Agent(node, self._id(), self._number())
        self._start_workers(node)

    def kill_worker(self, worker, status=-9):
        if not worker.alive:
            return
        worker.alive = False
        self._hang_up(worker)
        agent = self.agents[worker.node]
        if agent.alive:
            agent.unsaid.append(WorkerExit(worker.local_rank, status, worker.pid))
            for other in self.of(worker.node):
                self.kill_worker(other)
            if agent.restarts and not agent.leaving and agent.code is None and status not in (0, 2):
                agent.restarts -= 1
                agent.restart_at = self.now + 1.0

    def kill_node(self, node):
        agent = self.agents[node]
        agent.alive = False
        self._hang_up(agent)
        for worker in self.of(node):
            self.kill_worker(worker)

    def leave(self, node):
        agent = self.agents[node]
        if agent.alive and not agent.leaving:
            agent.leaving = True
            agent.unsaid.append(Leave())

    def cut_off(self, node):
        self.cut.add(node)

    def heal(self, node):
        if node in self.cut:
            self.cut.discard(node)
            for client in (self.agents[node], *self.of(node)):
                self._hang_up(client)

    def break_connection(self, worker):
        self._hang_up(worker)

    def restart_coordinator(self):
        for wire in list(self.wires.values()):
            wire.client.wire = None
        self.wires, self.stores = {}, []
        self.machine = Membership(self.rules, self.now)

    def evidence(self, worker):
        if worker.trains and not worker.stopped:
            self._leave_generation(worker, "an exception")

    # Looking at it.

    def of(self, node):
        return [worker for worker in self.workers if worker.node == node and worker.alive]

    @property
    def alive(self):
        return [worker for worker in self.workers if worker.alive]

    def complete_generations(self):
        """The worlds in which every rank trains now: they can commit steps."""
        held = {}
        for worker in self.workers:
            if worker.trains:
                world = worker.world
                held.setdefault((world.generation, world.times["formed"]), []).append(worker)
        return [
            workers[0].world
            for workers in held.values()
            if len(workers) == len(workers[0].world.seats)
        ]

    def recorded(self, event):
        return [record for record in self.events if record.event == event]

    # Time.

    def run(self, seconds):
        for _ in range(round(seconds / STEP_SECONDS)):
            self.step()

    def run_until(self, condition, seconds=60.0):
        for _ in range(round(seconds / STEP_SECONDS)):
            if condition():
                return
            self.step()
        assert condition(), self.machine.describe(self.now)

    def step(self):
        self.now += STEP_SECONDS
        for due, generation in [store for store in self.stores if store[0] <= self.now]:
            self.stores.remove((due, generation))
            self._obey(self.machine.store_opened(self.now, generation, 1234))
        clients = [*self.agents.values(), *self.workers]
        self.random.shuffle(clients)
        for client in clients:
            if client.alive and not client.stopped:
                (self._run_agent if isinstance(client, Agent) else self._run_worker)(client)
        self._reach_boundaries()
        wires = list(self.wires.values())
        self.random.shuffle(wires)
        for wire in wires:
            self._deliver(wire)
        self._obey(self.machine.tick(self.now))
        assert len(self.complete_generations()) <= 1

    def _deliver(self, wire):
        # Some of it, in order; the rest in a later step.
        if wire.client.node in self.cut:
            return
        count = self.random.randint(0, len(wire.to_server) + 1)
        for line in wire.to_server[:count]:
            if wire.key not in self.wires:
                return
            message = parse_to_server(line)
            self._obey(self.machine.received(self.now, wire.key, message, more=self._more()))
        del wire.to_server[:count]
        if wire.closing and not wire.to_server and self.wires.pop(wire.key, None):
            self._obey(self.machine.disconnected(self.now, wire.key, more=self._more()))

    def _obey(self, orders):
        for order in orders:
            if isinstance(order, Send):
                if order.key in self.wires:
                    self.wires[order.key].to_client.append(encode(order.message))
            elif isinstance(order, Close):
                wire = self.wires.pop(order.key, None)
                if wire is not None and wire.client.wire is wire:
                    wire.client.wire = None
            elif isinstance(order, OpenStore):
                self.stores.append((self.now + 0.05, order.generation))
            elif isinstance(order, Record):
                self.events.append(order)
            elif isinstance(order, End):
                self.end = order

    # The fakes.

    def _number(self):
        self.counter += 1
        return self.counter

    def _id(self):
        return f"process-{self._number()}"

    def _start_workers(self, node):
        for local_rank in range(self.local_world):
            worker = Worker(node, local_rank, self.local_world, self._id(), self._number())
            self._be_ready(worker)
            self.workers.append(worker)

    def _hang_up(self, client):
        if client.wire is not None:
            client.wire.closing = True
            client.wire = None

    def _say(self, client, message):
        if client.wire is not None:
            client.wire.to_server.append(encode(message))

    def _connect(self, client, hello):
        if client.node in self.cut:
            return False
        key = self._number()
        client.wire = self.wires[key] = Wire(key, client)
        more = self._more()
        self._obey(self.machine.connected(self.now, key, hello, "127.0.0.1", more=more))
        return True

    def _more(self):
        return self.crowd is not None and self.crowd.random() < 0.7

    def _be_ready(self, worker):
        worker.waiting, worker.fenced, worker.stuck = True, False, False
        place = None
        if worker.world is not None:
            stages, width = self.grid[2], self.grid[0]
            per_stage = len(worker.world.seats) // stages
            place = [worker.world.rank // per_stage, worker.world.rank % width]
        state = {
            "generation": worker.generation,
            "step": worker.step,
            "ready": False,
            "coordinate": place,
            "grid": self.grid,
        }
        after = worker.world.generation if worker.world else 0
        worker.standing = [Ready(state, self.settings, after)]
        self._say(worker, worker.standing[0])

    def _leave_generation(self, worker, cause):
        worker.fenced = True
        worker.standing = [Evidence(worker.world.generation, cause)]
        self._say(worker, worker.standing[0])

    def finish(self, worker, code=0):
        worker.standing = [Finish(code)]
        self._say(worker, worker.standing[0])

    def _run_agent(self, agent):
        if agent.wire is None:
            if self.end is not None or not self._connect(
                agent, Hello(AGENT, agent.node, agent.id, pid=agent.pid)
            ):
                return
            if agent.leaving and not any(isinstance(m, Leave) for m in agent.unsaid):
                agent.unsaid.append(Leave())
        for line in agent.wire.to_client:
            message = parse_from_server(line)
            assert isinstance(message, Stop)
            agent.code, agent.stop_at = message.code, self.now + 1.0
        agent.wire.to_client.clear()
        if agent.code is not None:
            # The workers were told as well, and say their errors themselves.
            if self.now >= agent.stop_at or not self.of(agent.node):
                self.kill_node(agent.node)
            return
        for message in agent.unsaid:
            self._say(agent, message)
        agent.unsaid.clear()
        if self.now >= agent.next_beat:
            agent.next_beat = self.now + self.rules.limits.heartbeat_interval
            self._say(agent, Beat())
        if agent.restart_at is not None and self.now >= agent.restart_at:
            agent.restart_at = None
            if not self.of(agent.node):
                self._start_workers(agent.node)

    def _run_worker(self, worker):
        if worker.wire is None:
            held = None
            if worker.world is not None:
                held = HeldWorld(
                    generation=worker.world.generation,
                    formed=worker.world.times["formed"],
                    seats=worker.world.seats,
                    step=worker.step,
                    training=worker.trains,
                )
            hello = Hello(
                WORKER,
                worker.node,
                worker.id,
                worker.local_rank,
                worker.local_world,
                worker.pid,
                held,
            )
            if self._connect(worker, hello):
                for message in worker.standing:
                    self._say(worker, message)
        if worker.wire is not None:
            lines, worker.wire.to_client = worker.wire.to_client, []
            for line in lines if worker.node not in self.cut else ():
                self._hear(worker, parse_from_server(line))
        if worker.told is not None:
            self.kill_worker(worker, worker.told.code)
            return
        if worker.trains and self._peer_broke(worker) and self.random.random() < 0.5:
            self._leave_generation(worker, "a collective broke")
        if worker.fenced and not worker.stuck and self.random.random() < 0.5:
            self._be_ready(worker)
        if worker.gives and self.random.random() < 0.5:
            worker.gives = False
            self._be_ready(worker)
        if worker.trains and not worker.frozen:
            worker.progress += 1
            if worker.generation != worker.world.generation:
                worker.generation = worker.world.generation
                worker.step = max(seat.state["step"] for seat in worker.world.seats)
            worker.step += 1
            if worker.world.final:  # saved
                self.finish(worker, 1)
        if self.now >= worker.next_beat:
            worker.next_beat = self.now + self.rules.limits.heartbeat_interval
            generation = worker.world.generation if worker.world else 0
            self._say(worker, Beat(generation, worker.progress, 0.5, {"step": worker.step}))

    def _hear(self, worker, message):
        if isinstance(message, Fence):
            if worker.world is not None and message.generation == worker.world.generation:
                worker.fenced = worker.fenced or worker.trains
        elif isinstance(message, Seated):
            assert worker.told is None, "a fenced process returned"
            if worker.world is not None and message.generation == worker.world.generation:
                assert message.times == worker.world.times
                return  # said twice
            assert worker.waiting, "seated while in another generation"
            if message.rank >= len(message.seats):
                donor = message.donors[message.rank - len(message.seats)]
                assert (donor.node, donor.local_rank) == (worker.node, worker.local_rank)
                worker.gives = True
                return
            assert worker.world is None or message.generation > worker.world.generation
            seat = message.seats[message.rank]
            assert (seat.node, seat.local_rank) == (worker.node, worker.local_rank)
            worker.world, worker.waiting, worker.fenced = message, False, False
            worker.bits, worker.leaving, worker.standing = 0, (), []
            worker.handed_over = False
            self.worlds[message.generation] = message
        elif isinstance(message, BoundaryOrder):
            worker.bits, worker.leaving = message.bits, message.leaving
        elif isinstance(message, Exit):
            if message.message == "left as planned" and worker.world is not None:
                went_on = any(w.step > worker.step for w in self.workers)
                assert worker.handed_over or went_on, "what a leaver holds is lost"
            worker.told = message
        elif isinstance(message, WhereQuery):
            self._say(worker, Whereabouts(worker.in_collective, "f"))
        else:
            raise AssertionError(message)

    def _peers(self, world):
        held = (world.generation, world.times["formed"])
        of_slot = {
            (w.node, w.local_rank): w
            for w in self.workers
            if w.world is not None and (w.world.generation, w.world.times["formed"]) == held
        }
        return [of_slot.get((seat.node, seat.local_rank)) for seat in world.seats]

    def _peer_broke(self, worker):
        peers = self._peers(worker.world)
        # Who was not told yet is still on its way.
        return any(peer is not None and not peer.trains for peer in peers)

    def _reach_boundaries(self):
        """Members agree on a boundary in a collective: all of them, or none."""
        for world in self.complete_generations():
            peers = self._peers(world)
            if all(p.bits and not p.stopped and p.node not in self.cut for p in peers):
                leaving = {node for peer in peers for node in peer.leaving}
                if leaving.issuperset(peer.node for peer in peers):  # saved
                    for peer in peers:
                        self.kill_worker(peer, 0)
                    return
                for peer in peers:
                    peer.handed_over = peer.node in leaving
                    self._say(peer, Paused({}, tuple(leaving)))
                    self._be_ready(peer)
