"""Who is a member: the one place that decides it.

A state machine without clock, sockets or threads: events come in with the time, orders go out. A
generation is `live` from its forming until it is over (fenced, or paused at a boundary). Only when
every member that is not lost is `ready`, the next one is formed; so nobody is ever in two.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_resilient.elastic.messages import (
    AGENT,
    CLIENT,
    MEMBERSHIP_CHANGES,
    WORKER,
    Answer,
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
    StatusQuery,
    Stop,
    ToServer,
    Whereabouts,
    WhereQuery,
    WorkerExit,
)
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
from megatron_resilient.elastic.roster import Agent, Process, Slot
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.seats import Candidate, assign_seats, node_order
from megatron_resilient.elastic.stragglers import Stragglers
from megatron_resilient.elastic.world import HeldWorld, Seat
from megatron_resilient.error_report import WRONG_USAGE
from megatron_resilient.errors import ProtocolError

_STORE_PAUSE_SECONDS = 1.0


class Membership:
    """The members of one job. Every event returns the orders that follow from it, in order."""

    def __init__(self, rules: Rules, now: float, unix_offset: float = 0.0) -> None:
        """Starts without members; a job that lives already makes itself known.

        Args:
            rules: The limits.
            now: The clock, in seconds; it must never run backwards.
            unix_offset: What to add to the clock to have seconds since 1970.
        """
        self.rules = rules
        self._limits = rules.limits
        self._offset = unix_offset
        self._started = self._ticked = now
        self._orders: list[Order] = []
        self._processes: dict[str, Process] = {}
        self._agents: dict[str, Agent] = {}
        self._roles: dict[int, str] = {}
        self._by_key: dict[int, Process | Agent | None] = {}
        # By process id: what whoever is out for good is told when it comes back.
        self._dismissed: dict[str, Exit] = {}
        self._leaving: set[str] = set()
        self._left_at = now  # when the last of them said so
        self._departing: frozenset[str] = frozenset()  # those that the coming boundary lets go
        self._settings: tuple[dict[str, Any], tuple[int, ...]] | None = None
        # The latest generation:
        self._generation = 0
        self._next = 1
        self._formed = 0.0  # seconds since 1970
        self._formed_here = False  # by us, not by a predecessor
        self._seated: dict[str, Seated] = {}  # by process id: what it was told
        self._slots: tuple[Slot, ...] = ()
        self._live = False
        self._final = False
        self._cause = "start"
        self._pausing = False
        self._awaited: set[Slot] = set()  # seats that nobody claimed since our restart
        self._awaited_until = 0.0
        # Its end:
        self._evidence_at = 0.0  # seconds since 1970
        self._last_sign = 0.0  # the same; 0 if nobody fell silent
        self._fence_text = ""
        self._out_until: float | None = None
        self._lost: dict[str, bool] = {}  # node -> whether its death is proven
        self._left: set[str] = set()
        self._short_since: float | None = None
        self._short_of = ""
        self._ending: Exit | None = None
        # Stores:
        self._store_port: int | None = None  # of the store for `_next`
        self._store_wanted = 0
        self._store_retry = 0.0
        # Watching:
        self._progress_at = now
        self._asked_at: float | None = None
        self._window_at = now
        self._stragglers = Stragglers(rules.straggler_ratio, rules.straggler_windows)
        self._newest_step = 0
        self._last_recovery: dict[str, Any] | None = None
        self._ended: End | None = None

    @property
    def generation(self) -> int:
        """Number of the latest generation; 0 before the first."""
        return self._generation

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._ended is not None

    # Events.

    def connected(self, now: float, key: int, hello: Hello, host: str) -> list[Order]:
        """Somebody proved that it knows the token, and was welcomed.

        Args:
            now: The clock.
            key: The connection; never used twice.
            hello: What it said.
            host: Our own address on that connection.
        """
        self._advance(now)
        self._by_key[key], self._roles[key] = None, hello.role
        if hello.role == AGENT:
            self._meet_agent(now, key, hello)
        elif hello.role == WORKER:
            self._meet_worker(now, key, hello, host)
        return self._settle(now)

    def disconnected(self, now: float, key: int, proven: bool = True) -> list[Order]:
        """A connection ended.

        Args:
            now: The clock.
            key: The connection.
            proven: The other machine said so. It is silence if packets were only unanswered.
        """
        self._advance(now)
        self._roles.pop(key, None)
        who = self._by_key.pop(key, None)
        if who is not None and who.key == key:
            who.key = None
            if isinstance(who, Process):
                who.lost_at, who.proven = now, proven
                if who.finished is not None and not who.member:
                    self._processes.pop(who.hello.id, None)
        return self._settle(now)

    def received(self, now: float, key: int, message: ToServer) -> list[Order]:
        """A message came.

        Raises:
            ProtocolError: It is not for this sender to say, or its content is wrong. Nothing has
                changed; the connection is to be closed.
        """
        self._advance(now)
        who = self._by_key.get(key)
        if who is not None:
            who.heard = now
        if isinstance(who, Process):
            self._hear_worker(now, who, message)
        elif isinstance(who, Agent):
            self._hear_agent(now, who, message)
        elif self._roles.get(key) == CLIENT:
            self._hear_user(now, key, message)
        # Else it was dismissed, and had not heard of it yet.
        return self._settle(now)

    def store_opened(self, now: float, generation: int, port: int) -> list[Order]:
        """The store that was ordered for a generation listens."""
        self._advance(now)
        if generation == self._next:
            self._store_port = port
        else:
            self._orders.append(CloseStore(generation))
        return self._settle(now)

    def store_failed(self, now: float, generation: int, why: str) -> list[Order]:
        """That store could not be started; it is tried again."""
        self._advance(now)
        self._log(f"no store for generation {generation}: {why}; trying again")
        if generation == self._store_wanted:
            self._store_wanted, self._store_retry = 0, now + _STORE_PAUSE_SECONDS
        return self._settle(now)

    def tick(self, now: float) -> list[Order]:
        """Time passes; to be called several times per heartbeat interval."""
        self._advance(now)
        return self._settle(now)

    def _advance(self, now: float) -> None:
        gap = now - self._ticked
        if gap > max(1.0, 2 * self._limits.heartbeat_interval):
            # It was we who stood still: what the others said meanwhile is still to be read.
            self._log(f"the coordinator stood still for {gap:.1f} s; no silence of it counts")
            for process in self._processes.values():
                process.heard += gap
            for agent in self._agents.values():
                agent.heard += gap
            self._progress_at += gap
            self._awaited_until += gap
            if self._out_until is not None:
                self._out_until += gap
        self._ticked = now

    # Who comes.

    def _meet_agent(self, now: float, key: int, hello: Hello) -> None:
        known = self._agents.get(hello.node)
        if self._ended is not None:
            self._send(key, Stop(self._ended.code))
        elif known is not None and known.hello.id != hello.id and known.key is not None:
            text = f"node id {hello.node!r} has an agent already, with pid {known.hello.pid}"
            self._log(f"refused: {text}")
            self._send(key, Stop(2, f"{text}; give each node an id of its own"))
        else:
            if known is not None and known.key is not None:
                self._hang_up(known.key)
            self._agents[hello.node] = self._by_key[key] = Agent(hello, key, now)

    def _meet_worker(self, now: float, key: int, hello: Hello, host: str) -> None:
        known = self._processes.get(hello.id)
        if self._ended is not None:
            self._send(key, Exit(self._ended.code, "", "the job is over"))
        elif hello.id in self._dismissed:
            self._send(key, self._dismissed[hello.id])
        elif known is not None:
            if known.key is not None:
                self._hang_up(known.key)
            known.hello, known.key, known.host = hello, key, host
            known.heard, known.lost_at = now, None
            self._by_key[key] = known
            self._remind(known)
        else:
            process = Process(hello, key, host, heard=now, arrived=now)
            if not self._refuse_duplicate(now, process):
                self._processes[hello.id] = self._by_key[key] = process
                if hello.world is not None:
                    self._take_back(now, process, hello.world)

    def _refuse_duplicate(self, now: float, process: Process) -> bool:
        """Refuses a process whose place another one has; a dead one gives it up."""
        for other in list(self._processes.values()):
            if other.node != process.node:
                continue
            if other.hello.local_world != process.hello.local_world and other.key is not None:
                why = (
                    f"node {process.node!r} has {other.hello.local_world} workers, "
                    f"not {process.hello.local_world}"
                )
            elif other.slot == process.slot and self._supersedes(process, other):
                self._awaited.add(other.slot)
                self._dismiss(other, self._fenced_exit(other.node, "the job went on without it"))
                return False
            elif other.slot == process.slot and other.key is not None and other.finished is None:
                why = (
                    f"node {process.node!r} has a worker {process.hello.local_rank} already, with "
                    f"pid {other.hello.pid}; give each node an id of its own"
                )
            elif other.slot == process.slot:
                self._lose(now, process.node, "a worker was replaced by a new one", proven=True)
                return False
            else:
                continue
            self._log(f"refused: {why}")
            assert process.key is not None
            self._send(process.key, Exit(2, "RefusedError", why))
            return True
        return False

    def _supersedes(self, process: Process, other: Process) -> bool:
        """Tells whether the other is a zombie that came back, after our restart, before this."""
        own, held = process.hello.world, other.hello.world
        return (
            not self._formed_here
            and other.member
            and own is not None
            and held is not None
            and (own.generation, own.formed) == (self._generation, self._formed)
            and held.generation < own.generation
        )

    def _take_back(self, now: float, process: Process, held: HeldWorld) -> None:
        """A process that has a generation, and that we do not know: we were restarted."""
        newer = held.generation > self._generation
        if newer and not self._formed_here and (self._awaited or not self._live):
            self._take_over(now, held)
        stale = (held.generation, held.formed) != (self._generation, self._formed)
        if process.slot not in self._awaited or (
            stale and (newer or held.generation >= self._generation)
        ):
            self._dismiss(process, self._fenced_exit(process.node, "the job went on without it"))
            return
        self._awaited.discard(process.slot)
        process.member = True
        process.report = {"step": held.step}
        self._newest_step = max(self._newest_step, held.step)
        if stale or not held.training or not self._live:
            # It did not hear of the newest generation, or has left it: that one cannot go on.
            self._fence(now, "the coordinator was restarted", cause="coordinator")
            self._send_fence(process)
        elif not self._awaited:
            self._log(f"generation {self._generation}: all members are back, training went on")

    def _take_over(self, now: float, held: HeldWorld) -> None:
        """Makes the generation that a member holds the latest one."""
        members = [process for process in self._processes.values() if process.member]
        for process in members:
            process.member = False
        self._generation, self._formed = held.generation, held.formed
        # Our predecessor may have announced the next one to members that have not come back yet.
        self._renumber(held.generation + 2)
        self._slots = tuple((seat.node, seat.local_rank) for seat in held.seats)
        self._awaited = set(self._slots)
        self._awaited_until = now + self._limits.heartbeat_timeout
        self._live, self._pausing, self._cause = True, False, "coordinator"
        self._progress_at, self._asked_at = now, None
        self._lost, self._left, self._short_since = {}, set(), None
        self._log(f"generation {held.generation} of {len(self._slots)} ranks lives: taken over")
        for process in members:
            held_before = process.hello.world
            assert held_before is not None
            self._take_back(now, process, held_before)

    def _remind(self, process: Process) -> None:
        """Says again what a process that was away may have missed."""
        if not process.member:
            return
        assert process.key is not None
        held = process.hello.world
        here = held is not None and (held.generation, held.formed) == (
            self._generation,
            self._formed,
        )
        if self._live and not here and self._seated.get(process.hello.id):
            process.seated_on = process.key
            self._send(process.key, self._seated[process.hello.id])
        if not self._live and process.ready is None:
            self._send_fence(process)
        elif self._live and self._pausing:
            self._send(process.key, self._boundary_order())

    # What they say.

    def _hear_worker(self, now: float, process: Process, message: ToServer) -> None:
        if isinstance(message, Beat):
            self._hear_beat(now, process, message)
        elif isinstance(message, Ready):
            self._hear_ready(now, process, message)
        elif isinstance(message, Evidence):
            if process.member and message.generation == self._generation:
                self._fence(now, f"node {process.node}: {message.cause}")
        elif isinstance(message, Paused):
            process.paused = True
            self._progress_at = now
        elif isinstance(message, Finish):
            self._hear_finish(now, process, message)
        elif isinstance(message, Whereabouts):
            process.in_collective, process.at = message.in_collective, message.at
        else:
            raise ProtocolError(f"a worker may not say {message.TYPE!r}")

    def _hear_beat(self, now: float, process: Process, beat: Beat) -> None:
        process.report = beat.report
        self._newest_step = max(self._newest_step, self._step() or 0)
        if beat.progress != process.progress:
            process.progress = beat.progress
            if process.member:
                self._progress_at, self._asked_at = now, None
        if beat.busy is not None and process.member and self._live:
            process.busy.append(beat.busy)

    def _hear_ready(self, now: float, process: Process, ready: Ready) -> None:
        grid = _check_state(ready.state)
        if process.member and self._is_answered(process, ready):
            return
        if process.ready is None:
            process.arrived = now
        process.ready = ready
        if process.member and self._live and not self._pausing:
            self._fence(now, f"node {process.node} left generation {self._generation}")
        if self._settings is None and (process.member or not self._generation):
            self._settings = (ready.settings, grid)
        for other in list(self._processes.values()):
            self._refuse_other_settings(now, other)

    def _is_answered(self, process: Process, ready: Ready) -> bool:
        """Tells whether a `ready` was said before the process heard of the seat that it has."""
        if ready.after is None or ready.after >= self._generation:
            return False
        held = process.hello.world
        knows = held is not None and held.generation == self._generation
        return knows or process.seated_on == process.key

    def _refuse_other_settings(self, now: float, process: Process) -> None:
        if process.ready is None or self._settings is None:
            return
        settings, grid = self._settings
        own = process.ready.settings | {"grid": list(_check_state(process.ready.state))}
        job = settings | {"grid": list(grid)}
        differing = sorted(n for n in own.keys() | job.keys() if own.get(n) != job.get(n))
        if differing:
            shown = ", ".join(f"{n} {own.get(n)!r} is not {job.get(n)!r}" for n in differing)
            why = f"node {process.node} differs from the job: {shown}; start it with equal flags"
            self._log(f"refused: {why}")
            self._lose(now, process.node, why, True, Exit(2, "RefusedError", why))

    def _hear_finish(self, now: float, process: Process, finish: Finish) -> None:
        if finish.error and process.member and self._ending is None:
            process.finished = finish.exit
            code = WRONG_USAGE if finish.exit == WRONG_USAGE else 1
            self._end(code, finish.error, finish.message)
            return
        if finish.exit and self._ending is None:
            why = f"a worker ended with exit code {finish.exit}"
            self._lose(now, process.node, why, True, spare=process)
        process.finished = finish.exit

    def _hear_agent(self, now: float, agent: Agent, message: ToServer) -> None:
        if isinstance(message, WorkerExit):
            self._hear_exit(now, agent.hello.node, message)
        elif isinstance(message, Leave):
            self._leave(now, agent.hello.node)
        elif not isinstance(message, Beat):
            raise ProtocolError(f"an agent may not say {message.TYPE!r}")

    def _hear_exit(self, now: float, node: str, ended: WorkerExit) -> None:
        if node in self._lost:
            self._lost[node] = True
        slot = (node, ended.local_rank)
        process = next((p for p in self._processes.values() if p.slot == slot), None)
        if process is None and slot in self._awaited:
            self._lose(now, node, _how(ended), proven=True)
        elif process is not None and process.hello.pid == ended.pid:
            if ended.status == 0 or process.finished is not None:
                process.finished = process.finished or 0
            else:
                self._lose(now, node, _how(ended), proven=True)

    def _hear_user(self, now: float, key: int, message: ToServer) -> None:
        if isinstance(message, StatusQuery):
            self._send(key, Answer(self.describe(now)))
        elif isinstance(message, Leave):
            known = {p.node for p in self._processes.values()} | self._agents.keys()
            if message.node in known:
                self._leave(now, message.node)
                self._send(key, Answer({"node": message.node, "leaving": True}))
            else:
                there = ", ".join(sorted(known, key=node_order)) or "none yet"
                why = f"there is no node {message.node!r}; there are: {there}"
                self._send(key, Answer({}, why))
        else:
            raise ProtocolError(f"a client may not say {message.TYPE!r}")

    def _leave(self, now: float, node: str) -> None:
        if node not in self._leaving:
            self._leaving.add(node)
            self._left_at = now
            self._log(f"node {node} will leave at the next step boundary")

    # Who goes.

    def _lose(
        self,
        now: float,
        node: str,
        cause: str,
        proven: bool,
        told: Exit | None = None,
        spare: Process | None = None,
    ) -> None:
        """Drops a node for good: its processes never come back.

        Args:
            now: The clock.
            node: The node.
            cause: What was seen.
            proven: It is known to be dead, and not on the other side of a cut.
            told: What its processes are told; by default that the job goes on without them.
            spare: A process that ends by itself.
        """
        there = [process for process in self._processes.values() if process.node == node]
        was_member = any(process.member for process in there) or any(
            slot[0] == node for slot in self._awaited
        )
        ranks = [rank for rank, slot in enumerate(self._slots) if slot[0] == node]
        for process in there:
            if process is spare:
                del self._processes[process.hello.id]
                self._dismissed[process.hello.id] = self._fenced_exit(node, cause)
                if process.key is not None:
                    self._by_key[process.key] = None
            else:
                self._dismiss(process, told or self._fenced_exit(node, cause))
        self._awaited = {slot for slot in self._awaited if slot[0] != node}
        if was_member and node not in self._lost:
            self._lost[node] = proven
            self._log(f"node {node} is lost: {cause}")
            self._record("failure", cause=cause, failed_ranks=ranks, failed_nodes=[node])
            self._fence(now, f"node {node} is lost: {cause}", recorded=True)

    def _dismiss(self, process: Process, told: Exit) -> None:
        self._processes.pop(process.hello.id, None)
        self._dismissed[process.hello.id] = told
        if process.key is not None:
            self._by_key[process.key] = None
            self._send(process.key, told)

    def _fenced_exit(self, node: str, cause: str) -> Exit:
        return Exit(
            1,
            "FencedError",
            f"node {node} is a member no longer ({cause}); started again, it joins as a new one",
        )

    def _fence(
        self, now: float, why: str, *, cause: str = "failure", recorded: bool = False
    ) -> None:
        """Ends the generation for all of its members at once."""
        if not self._live:
            return
        self._live = self._pausing = False
        self._cause = cause
        self._evidence_at = now + self._offset
        self._out_until = now + self._limits.fence_timeout
        self._log(f"generation {self._generation} is over: {why}")
        if not recorded:
            self._record("failure", cause=why, failed_ranks=[], failed_nodes=[])
        self._fence_text = why
        for process in self._processes.values():
            if process.member and process.ready is None:
                self._send_fence(process)

    def _send_fence(self, process: Process) -> None:
        if process.key is not None:
            order = Fence(self._generation, self._fence_text, self._evidence_at)
            self._send(process.key, order)

    # What follows.

    def _settle(self, now: float) -> list[Order]:
        """Does everything that can be done now, and returns the orders of this event."""
        if self._ended is None:
            self._notice_silence(now)
            self._close_boundary(now)
            self._notice_stuck(now)
            self._notice_hang(now)
            self._notice_stragglers(now)
            self._finish()
        if self._ended is None:
            self._open_store(now)
            self._form(now)
            self._change(now)
        orders, self._orders = self._orders, []
        return orders

    def _notice_silence(self, now: float) -> None:
        for process in list(self._processes.values()):
            if process.hello.id not in self._processes or process.finished is not None:
                continue
            agent = self._agents.get(process.node)
            there = agent is not None and agent.answers(now, self._limits.heartbeat_timeout / 2)
            if now - process.heard > self._limits.heartbeat_timeout:
                why = f"no heartbeat for {now - process.heard:.1f} s"
                if self._live:
                    self._last_sign = process.heard + self._offset
                self._lose(now, process.node, why, proven=there)
            elif (
                process.lost_at is not None
                and (agent is None or agent.key is None)
                and now - process.lost_at > self.rules.grace
            ):
                why = "its connections broke"
                self._lose(now, process.node, why, proven=process.proven)
        if self._awaited and now >= self._awaited_until:
            for node in {slot[0] for slot in self._awaited}:
                self._lose(now, node, "it did not come back to the coordinator", proven=False)

    def _close_boundary(self, now: float) -> None:
        """A boundary ends the generation once all members stand at it."""
        if not self._pausing or self._awaited:
            return
        members = self._members()
        if any(process.ready for process in members) and self._out_until is None:
            self._out_until = now + self._limits.fence_timeout
        out = (
            process.ready or (process.paused and process.node in self._departing)
            for process in members
        )
        if members and all(out):
            self._live = self._pausing = False
            self._cause = "leave" if self._departing else "join"
            self._evidence_at = now + self._offset
            self._out_until = None

    def _notice_stuck(self, now: float) -> None:
        """A main thread that does not come out of a generation that is over is given up."""
        if self._out_until is None or now < self._out_until:
            return
        limit = self._limits.fence_timeout
        if self._live:  # some stand at the boundary, some do not
            self._fence(now, f"not all members came to the boundary within {limit:g} s")
            return
        self._out_until = None
        for process in self._members():
            if process.ready is None and process.hello.id in self._processes:
                why = f"its main thread did not leave the generation within {limit:g} s"
                told = Exit(1, "HangError", f"node {process.node}: {why}")
                self._lose(now, process.node, why, True, told)

    def _notice_hang(self, now: float) -> None:
        limit = self._limits.hang_timeout
        members = self._members()
        if not (limit and self._live and members) or now - self._progress_at <= limit:
            return
        if self._asked_at is None:
            self._asked_at = now
            for process in members:
                process.in_collective = None
                if process.key is not None:
                    self._send(process.key, WhereQuery())
            return
        silent = any(process.in_collective is None for process in members)
        if silent and now - self._asked_at < self._limits.heartbeat_timeout:
            return
        outside = [process for process in members if process.in_collective is False]
        self._progress_at, self._asked_at = now, None
        if len(outside) == len(members):
            # Nobody waits for anybody: a long load or save. Giving all up would end the job.
            at = outside[0].at
            self._log(f"no progress for {limit:g} s, and nobody is in a collective: {at}")
            return
        for process in outside:
            if process.hello.id in self._processes:
                why = f"it hangs in {process.at} while the others wait for it"
                told = Exit(1, "HangError", f"node {process.node}: {why}")
                self._lose(now, process.node, why, True, told)
        self._fence(now, f"no progress for {limit:g} s")

    def _notice_stragglers(self, now: float) -> None:
        if now - self._window_at < self.rules.straggler_window:
            return
        self._window_at = now
        shares: defaultdict[str, list[float]] = defaultdict(list)
        for process in self._members():
            shares[process.node] += process.busy
            process.busy = []
        means = {node: sum(own) / len(own) for node, own in shares.items() if own}
        slow, middle = self._stragglers.judge(means)
        for node in slow:
            self._log(f"node {node} is slow: busy {means[node]:.0%} of the time, the others less")
            self._record("straggler", member=node, busy=means[node], median_busy=middle)

    def _finish(self) -> None:
        """The job is over when all of the members that are left are done."""
        members = [process for process in self._processes.values() if process.member]
        if not members or self._awaited or any(p.finished is None for p in members):
            return
        if self._ending is not None:
            self._end(self._ending.code, self._ending.error, self._ending.message)
        else:
            self._end(0, "", "training is done")

    def _open_store(self, now: float) -> None:
        # One ahead, so that a recovery does not wait for it.
        wanted = self._store_port is None and self._store_wanted != self._next
        if wanted and self._processes and now >= self._store_retry:
            self._store_wanted = self._next
            self._orders.append(OpenStore(self._next))

    def _renumber(self, number: int) -> None:
        if self._store_port is not None:
            self._orders.append(CloseStore(self._next))
        self._next, self._store_port = number, None

    def _form(self, now: float) -> None:
        """Forms the next generation if it can be."""
        if self._live or self._awaited:
            return
        # Who leaves goes after a boundary, when its state was handed over. After a failure it was
        # not: then the leaver takes part once more.
        departing = self._departing if self._cause == "leave" else frozenset()
        survivors = [p for p in self._members() if p.node not in departing]
        if any(not process.waits for process in survivors):
            return
        chosen = [
            process
            for process in self._complete()
            if process.node not in departing
            and (process.member or process.node not in self._leaving)
        ]
        seats, _ = self._seat(chosen)
        if departing and seats:
            self._depart(departing)
        elif departing:
            # Somebody has to save what they all hold.
            leavers = [p for p in self._members() if p.node in departing]
            if any(not process.waits for process in leavers):
                return
            chosen = self._complete()
            seats, _ = self._seat(chosen)
            self._ending = self._ending or Exit(
                1, "TooFewNodesError", "the nodes that stay when others leave are too few to train"
            )
        if not self._generation and not self._may_start(now, chosen):
            return
        final = self._ending is not None
        short = self._shortage(chosen, seats)
        if short and not final:
            if not self._wait_for_more(now, short, survivors, bool(seats)):
                return
            final = self._ending is not None
        if not seats:
            if final and self._ending is not None:
                self._end(self._ending.code, self._ending.error, self._ending.message)
            return
        if not survivors and self._generation and not self._quiet(now, chosen):
            return
        if self._store_port is not None:
            self._seat_all(now, chosen, final)

    def _may_start(self, now: float, ready: list[Process]) -> bool:
        nodes = {process.node for process in ready}
        most = self._most()
        if most is not None and len(nodes) >= most:
            return True
        # A job that lives already may be on its way to us.
        return self._quiet(now, ready) and not self._is_young(now)

    def _is_young(self, now: float) -> bool:
        """Tells whether members of a job that lives may not have found us yet."""
        held_off = max(self._limits.join_window, 3 * self._limits.heartbeat_interval)
        return not self._generation and now - self._started < held_off

    def _quiet(self, now: float, ready: list[Process]) -> bool:
        """Tells whether nobody came within the window."""
        arrivals = [process.arrived for process in self._processes.values()]
        return bool(ready) and now - max(arrivals) >= self._limits.join_window

    def _least(self) -> int:
        told = self._settings[0].get("min_nodes") if self._settings else None
        return max(self.rules.min_nodes, told if isinstance(told, int) else 1)

    def _most(self) -> int | None:
        told = self._settings[0].get("max_nodes") if self._settings else None
        return self.rules.max_nodes or (told if isinstance(told, int) else None)

    def _complete(self) -> list[Process]:
        """Returns the waiting workers of the nodes of which all workers wait."""
        waiting: defaultdict[str, list[Process]] = defaultdict(list)
        for process in self._processes.values():
            if process.waits:
                waiting[process.node].append(process)
        return [
            process
            for workers in waiting.values()
            if len(workers) == workers[0].hello.local_world
            for process in workers
        ]

    def _members(self) -> list[Process]:
        """Returns the members that are neither lost nor done."""
        return [p for p in self._processes.values() if p.member and p.finished is None]

    def _seat(self, chosen: Iterable[Process]) -> tuple[tuple[Seat, ...], tuple[Seat, ...]]:
        candidates = [
            Candidate(Seat(*process.slot, process.ready.state), process.member)
            for process in chosen
            if process.ready is not None
        ]
        if not candidates:
            return (), ()
        grid = self._settings[1] if self._settings else _check_state(candidates[0].seat.state)
        return assign_seats(candidates, grid)

    def _shortage(self, chosen: list[Process], seats: tuple[Seat, ...]) -> str:
        """Says what keeps the next generation from being formed; empty if nothing does."""
        before = {slot[0] for slot in self._slots}
        here = before.intersection(process.node for process in chosen)
        dead = {node for node, proven in self._lost.items() if proven} | self._left
        silent = {node for node, proven in self._lost.items() if not proven} - here
        if silent and 2 * len(here) < len(before - (dead - here)):
            return "partition"
        nodes = {process.node for process in chosen}
        return "" if seats and len(nodes) >= self._least() else "nodes"

    def _wait_for_more(
        self, now: float, short: str, survivors: list[Process], enough_to_save: bool
    ) -> bool:
        """Waits, and at last ends; returns whether a last generation is to be formed."""
        if not self._generation:
            return False
        if self._short_since is None or self._short_of != short:
            self._short_since, self._short_of = now, short
            what = "too few nodes" if short == "nodes" else "the smaller side of a cut"
            limit = self._limits.rejoin_timeout
            self._log(f"{what}: waiting up to {limit:g} s for others")
        if now - self._short_since < self._limits.rejoin_timeout:
            return False
        limit = self._limits.rejoin_timeout
        if short == "partition":
            silent = ", ".join(n for n, proven in self._lost.items() if not proven)
            self._end(
                1,
                "PartitionError",
                f"nodes {silent} fell silent and are the larger part, so they may go on without "
                f"us; they did not come back within {limit:g} s. Check the network and start again",
            )
            return False
        why = (
            f"fewer than {self._least()} nodes, or too few for one block of TP x CP x PP, for "
            f"{limit:g} s; start more nodes, or lower --nnodes"
        )
        if survivors and enough_to_save:
            self._ending = Exit(1, "TooFewNodesError", why)
            return True
        self._end(1, "TooFewNodesError", why)
        return False

    def _seat_all(self, now: float, chosen: list[Process], final: bool) -> None:
        seats, spares = self._seat(chosen)
        donors = tuple(spare for spare in spares if "step" in spare.state)
        before = {process.node for process in chosen if process.member}
        previous = sorted({slot[0] for slot in self._slots}, key=node_order)
        of_slot = {process.slot: process for process in chosen}
        here = {seat.node for seat in seats}
        lost = tuple(node for node in previous if node not in here or node not in before)
        standing_by = {process.node for process in chosen} - here
        joined = tuple(sorted(here - before, key=node_order))
        unix = now + self._offset
        first = self._generation == 0
        world = Seated(
            generation=self._next,
            seats=seats,
            rank=0,
            store_host="",
            store_port=self._store_port or 0,
            cause=self._cause,
            lost_nodes=lost,
            joined_nodes=joined,
            planned=all(node in self._left or node in standing_by for node in lost),
            times={
                # Of a loss that was noticed by silence; others are noticed at once.
                "last_sign": unix if first else (self._last_sign or self._evidence_at),
                "evidence": unix if first else self._evidence_at,
                "fence": unix if first else self._evidence_at,
                "formed": unix,
            },
            final=final,
            donors=donors,
            newest_step=self._newest_step,
        )
        if self._generation > 1:
            self._orders.append(CloseStore(self._generation - 1))
        self._generation, self._formed, self._final = self._next, unix, final
        self._next, self._store_port = self._next + 1, None
        self._slots = tuple((seat.node, seat.local_rank) for seat in seats)
        self._live, self._out_until, self._short_since = True, None, None
        self._last_sign = 0.0
        self._progress_at, self._asked_at, self._window_at = now, None, now
        for process in list(self._processes.values()):
            process.member = process.paused = False
            process.busy = []
            if process.finished is not None:
                del self._processes[process.hello.id]
        self._seated = {}
        for rank, slot in enumerate(self._slots):
            process = of_slot[slot]
            order = replace(world, rank=rank, store_host=process.host)
            process.member, process.ready, process.seated_on = True, None, process.key
            self._seated[process.hello.id] = order
            assert process.key is not None
            self._send(process.key, order)
        for rank, donor in enumerate(donors, start=len(seats)):
            process = of_slot[donor.node, donor.local_rank]
            process.ready = None  # it says so again when it has given what it holds
            assert process.key is not None
            self._send(process.key, replace(world, rank=rank, store_host=process.host))
        self._log(
            f"generation {self._generation} ({self._cause}): {len(seats)} ranks on "
            f"{len(here)} nodes"
            + (f", lost {', '.join(lost)}" if lost else "")
            + (f", joined {', '.join(joined)}" if joined else "")
        )
        for node in joined:
            self._record("member_join", member=node, members=len(here))
        for node in lost:
            if node in self._left:
                self._record("member_leave", member=node, members=len(here), planned=True)
        if not first:
            self._last_recovery = {
                "generation": self._generation,
                "cause": self._cause,
                "lost_nodes": list(lost),
                "joined_nodes": list(joined),
                "planned": world.planned,
                "time": unix,
                "seconds_to_form": unix - self._evidence_at,
            }
        self._lost, self._left, self._departing = {}, set(), frozenset()
        self._formed_here = True

    def _change(self, now: float) -> None:
        """Asks for a boundary when somebody wants to come or to go."""
        if not self._is_young(now):
            self._release()
        if not self._live or self._pausing or self._final or self._awaited:
            return
        leaves = self._leaving.intersection(slot[0] for slot in self._slots)
        # A job that is told to end hears it node by node, and is to save only once.
        go = leaves and now - self._left_at >= self.rules.leave_window
        if go or self._would_be_seated(now):
            self._order_boundary()

    def _release(self) -> None:
        """Lets those go that leave and have no seat."""
        holding = {p.node for p in self._processes.values() if p.member}
        self._depart(self._leaving - holding - {slot[0] for slot in self._awaited})

    def _depart(self, nodes: Iterable[str]) -> None:
        for node in tuple(nodes):
            there = [process for process in self._processes.values() if process.node == node]
            if any(process.member for process in there):
                self._left.add(node)
            for process in there:
                self._dismiss(process, Exit(0, "", "left as planned"))
            self._leaving.discard(node)
            agent = self._agents.pop(node, None)
            if agent is not None and agent.key is not None:
                self._send(agent.key, Stop(0))
                self._by_key[agent.key] = None

    def _would_be_seated(self, now: float) -> bool:
        """Tells whether joiners wait that the next generation would have a seat for."""
        joiners = [
            process
            for process in self._complete()
            if not process.member and process.node not in self._leaving
        ]
        if not joiners:
            return False
        if self._settings is None:  # restarted: what a block is, the members will say
            return self._quiet(now, joiners)
        tp, cp, pp = self._settings[1]
        block = tp * cp * pp
        more = (len(self._slots) + len(joiners)) // block > len(self._slots) // block
        return more and self._quiet(now, joiners)

    def _order_boundary(self) -> None:
        self._pausing, self._out_until = True, None
        self._departing = frozenset(self._leaving.intersection(slot[0] for slot in self._slots))
        for process in self._members():
            if process.key is not None:
                self._send(process.key, self._boundary_order())

    def _boundary_order(self) -> BoundaryOrder:
        return BoundaryOrder(MEMBERSHIP_CHANGES, tuple(sorted(self._departing, key=node_order)))

    def _end(self, code: int, error: str, message: str) -> None:
        self._ended = End(code)
        self._live = False
        self._log(f"the job is over: {message}")
        if error:
            self._record("error", message=message, type=error)
        for process in list(self._processes.values()):
            if process.finished is None and process.key is not None:
                self._send(process.key, Exit(code, error, message))
        for agent in self._agents.values():
            if agent.key is not None:
                self._send(agent.key, Stop(code))
        self._orders.append(self._ended)

    def _send(self, key: int, message: Any) -> None:
        self._orders.append(Send(key, message))

    def _hang_up(self, key: int) -> None:
        self._by_key.pop(key, None)
        self._orders.append(Close(key))

    def _log(self, text: str) -> None:
        self._orders.append(Log(text))

    def _record(self, event: str, **fields: Any) -> None:
        self._orders.append(Record(event, self._generation, self._step(), fields))

    def _step(self) -> int | None:
        steps = [p.report.get("step") for p in self._processes.values()]
        return max((step for step in steps if type(step) is int and step >= 0), default=None)

    # What people see.

    def describe(self, now: float) -> dict[str, Any]:
        """Returns the answer to `status`, as plain values."""
        rank_of = {slot: rank for rank, slot in enumerate(self._slots)}
        members = {process.slot: process for process in self._processes.values() if process.member}
        leader = next((members[s].report for s in self._slots if s in members), {})
        reports = [leader, *(process.report for process in members.values())]

        def fact(name: str) -> Any:
            return next((report[name] for report in reports if name in report), None)

        nodes = sorted({p.node for p in self._processes.values()} | self._agents.keys())
        return {
            "phase": self._phase(),
            "generation": self._generation,
            "world_size": len(self._slots),
            "step": self._step(),
            "tokens_per_second": fact("tokens_per_second"),
            "imbalance": fact("imbalance"),
            # Each rank speaks for its pipeline stage.
            "guaranteed_losses": min(
                (r["guaranteed_losses"] for r in reports if "guaranteed_losses" in r), default=None
            ),
            "min_nodes": self._least(),
            "nodes": [
                self._describe_node(now, node, rank_of) for node in sorted(nodes, key=node_order)
            ],
            "stragglers": list(self._stragglers.nodes),
            "last_recovery": self._last_recovery,
        }

    def _phase(self) -> str:
        if self._ended is not None:
            return "over"
        if self._awaited:
            return "members are coming back"
        if self._live:
            if self._final:
                return "saving to end"
            return "waiting for a step boundary" if self._pausing else "training"
        if self._short_since is not None:
            return "waiting for nodes"
        return "recovering" if self._generation else "waiting for nodes"

    def _describe_node(self, now: float, node: str, rank_of: dict[Slot, int]) -> dict[str, Any]:
        there = sorted(
            (process for process in self._processes.values() if process.node == node),
            key=lambda process: process.slot,
        )
        agent = self._agents.get(node)
        heard = [process.heard for process in there] or ([agent.heard] if agent else [])
        if any(process.member for process in there):
            role = "leaving" if node in self._leaving else "member"
        elif not there:
            role = "starting"
        else:
            role = "spare" if all(process.waits for process in there) else "joining"
        return {
            "node": node,
            "role": role,
            "ranks": [rank_of[p.slot] for p in there if p.member and p.slot in rank_of],
            "pids": [process.hello.pid for process in there],
            "agent_pid": agent.hello.pid if agent else None,
            "step": max((s for p in there if type(s := p.report.get("step")) is int), default=None),
            "silent_seconds": round(now - min(heard), 3) if heard else None,
            "straggler": node in self._stragglers.nodes,
        }


def _check_state(state: dict[str, Any]) -> tuple[int, ...]:
    """Returns the grid of a state, if the parts that are read here are what they must be."""
    grid, coordinate = state.get("grid"), state.get("coordinate")
    sizes = _counts(grid, 3)
    if sizes is None or min(sizes) < 1:
        raise ProtocolError(f"ready: the grid {grid!r:.60} is not [tp, cp, pp]")
    if coordinate is not None and _counts(coordinate, 2) is None:
        raise ProtocolError(f"ready: the coordinate {coordinate!r:.60} is not [pp, tp] or null")
    step = state.get("step", 0)
    if _counts([step], 1) is None:
        raise ProtocolError(f"ready: the step {step!r:.60} is no count")
    return sizes


def _counts(values: Any, length: int) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) != length:
        return None
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        return None
    return tuple(values)


def _how(ended: WorkerExit) -> str:
    what = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
    return f"worker {ended.local_rank} ended with {what}"
