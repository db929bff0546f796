"""A training process as a member: what its watchdog thread does, and what its main thread asks."""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

from megatron_resilient import errors
from megatron_resilient.elastic.busy_share import BusyShare
from megatron_resilient.elastic.environment import WorkerEnvironment
from megatron_resilient.elastic.link import Link
from megatron_resilient.elastic.messages import (
    SAVE_AND_END,
    WORKER,
    Beat,
    BoundaryOrder,
    Evidence,
    Exit,
    Fence,
    Finish,
    FromServer,
    Hello,
    Paused,
    Ready,
    Seated,
    ToServer,
    Whereabouts,
    WhereQuery,
)
from megatron_resilient.elastic.sockets import cut_sockets
from megatron_resilient.elastic.world import HeldWorld, Seat, World
from megatron_resilient.errors import CoordinatorLostError, ResilientError

__all__ = ["Fenced", "Member", "Seat", "World"]

_SAMPLE_SECONDS = 0.1
_CUT_AGAIN_SECONDS = 0.25
_FINISH_SECONDS = 2.0
_TELL_SECONDS = 1.0


class Fenced(Exception):
    """The generation is over for this process: go to `next_world`."""


class Member:
    """One training process's place in the job.

    A daemon thread, the watchdog, beats, receives orders and reconnects; it runs on while the main
    thread computes or waits. All public methods are for the main thread, unless they say otherwise.

    Attributes:
        on_fence: called on the watchdog thread when a generation is over, and again every quarter
            of a second until the main thread is in `next_world`: frees it from what it waits in.
        progress: grows while the main thread gets on; whoever completes something adds to it.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        """Starts the watchdog, which connects.

        Args:
            environment: what the agent said.
        """
        self.on_fence: Callable[[], None] = lambda: None
        self.progress = 0
        self._environment = environment
        self._id = secrets.token_hex(8)
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._stop = False  # whether check() raises; read without the lock
        self._cause = ""
        self._world: World | None = None  # the main thread's
        self._offered: World | None = None  # ordered, but not taken up by the main thread yet
        self._newest: World | None = None  # of all that were offered
        self._fenced_generation = 0
        self._over: Exit | ResilientError | None = None
        self._over_at: float | None = None
        self._bits = 0
        self._leaving: tuple[str, ...] = ()
        self._report: dict[str, Any] = {}
        self._standing: tuple[ToServer, ...] = ()  # said again after a reconnect
        self._outbox: list[ToServer] = []
        self._waiting = False  # the main thread is in next_world
        self._closing = False
        self._beat_wanted = False
        # The watchdog's own:
        self._next_cut = 0.0
        self._busy = BusyShare()
        self._link = Link(
            environment.host,
            environment.port,
            environment.token,
            self._hello,
            environment.heartbeat_timeout,
        )
        self._watchdog = threading.Thread(
            target=self._watch, name="resilient-watchdog", daemon=True
        )
        self._watchdog.start()

    @classmethod
    def from_environment(cls) -> Self | None:
        """Joins the job that an agent started this process for; None without an agent.

        Raises:
            ConfigError: the environment is not what an agent sets.
        """
        environment = WorkerEnvironment.read()
        return None if environment is None else cls(environment)

    @property
    def node(self) -> str:
        """Id of this process's node."""
        return self._environment.node

    @property
    def min_nodes(self) -> int:
        """The fewest nodes that may train; from --nnodes."""
        return self._environment.min_nodes

    @property
    def world(self) -> World | None:
        """The world that `next_world` returned last."""
        return self._world

    @property
    def fenced(self) -> bool:
        """Whether this generation is over. For any thread, and cheap."""
        return self._stop

    def check(self) -> None:
        """Does nothing while the generation lives. For any thread, and cheap.

        Raises:
            Fenced: it is over; `next_world` says how it goes on.
            ResilientError: it is over for this process for good.
            SystemExit: so it is, and that was planned.
        """
        if self._stop:
            self._raise()

    def next_world(self, state: dict[str, Any], settings: dict[str, Any]) -> World:
        """Waits for a seat; the main thread is out of the old generation, and holds nothing of it.

        Args:
            state: what this process holds; see the coordinator. Plain values.
            settings: must be equal in all processes of the job.

        Returns:
            The new world. A process that is not needed waits on, as a spare.

        Raises:
            ResilientError: there will be no seat: too few nodes, a partition, other settings, a
                coordinator that stays away, ...
            SystemExit: this process leaves as planned.
        """
        with self._changed:
            self._waiting = True
            self._offered = None
            self._say(self._ready(state, settings))
            while self._over is None:
                world = self._offered
                if world is not None and world.generation > self._fenced_generation:
                    self._world, self._offered, self._waiting = world, None, False
                    self._standing = ()
                    self._stop, self._cause = False, ""
                    self._report.pop("step", None)  # it was done in another generation
                    self.progress += 1
                    return world
                if world is not None:  # it was over before it began
                    self._offered = None
                    self._say(self._ready(state, settings))
                self._changed.wait()
            self._raise()

    def leave_generation(self, cause: str) -> None:
        """Says that this generation cannot go on: a collective broke, or an exception came."""
        with self._changed:
            if self._world is None or self._over is not None:
                return
            generation = self._world.generation
            self._fence(generation, cause)
            self._say(Evidence(generation, cause))

    @property
    def wants_boundary(self) -> int:
        """What is asked of the next step boundary: 0, or MEMBERSHIP_CHANGES | SAVE_AND_END."""
        away = self._link.absent_seconds > self._environment.coordinator_timeout
        return self._bits | (SAVE_AND_END if away else 0)

    def leaving(self) -> set[str]:
        """Returns the ids of the nodes that leave at the coming boundary."""
        return set(self._leaving)

    def boundary(self, state: dict[str, Any], leaving: Iterable[str] = ()) -> None:
        """Says that this process stands at the boundary and its state was handed over.

        Args:
            state: As in `next_world`.
            leaving: The nodes that all agreed to let go: what each was told, together.
        """
        with self._changed:
            self._say(Paused(state, tuple(sorted(leaving))))

    def report(self, **fields: Any) -> None:
        """Notes the latest facts of the training, for `status`. Plain values; None removes one."""
        with self._changed:
            self.progress += 1
            merged = self._report | fields
            self._report = {name: value for name, value in merged.items() if value is not None}

    def tell(self) -> None:
        """Sends what was reported now, not with the next beat; waits for that, a second at most."""
        with self._changed:
            self._beat_wanted = True
            self._link.wake()
            self._changed.wait_for(lambda: not self._beat_wanted, _TELL_SECONDS)

    def finish(self, exit_code: int, error: ResilientError | None = None) -> None:
        """Says that training is done here, and ends the watchdog.

        Args:
            exit_code: of this process.
            error: with which the whole job has to end: starting this node again would not help.
        """
        with self._changed:
            name, message = (type(error).__name__, str(error)) if error else ("", "")
            self._say(Finish(exit_code, name, message))
            self._closing = True
        self._link.wake()
        self._watchdog.join(_FINISH_SECONDS)

    def cut_off(self, seconds: float) -> None:
        """Ends all connections and reaches nobody for so long: a fault to inject."""
        self._link.keep_away(seconds)
        cut_sockets(())

    def spared_inodes(self) -> set[int]:
        """Returns the inodes of sockets that a fence must not cut. For any thread."""
        inode = self._link.inode()
        return set() if inode is None else {inode}

    # What follows runs with the lock held.

    def _say(self, message: ToServer) -> None:
        """Has the watchdog send a message now, and again after each reconnect until the next."""
        self._standing = (message,)
        self._outbox.append(message)
        self._link.wake()

    def _ready(self, state: dict[str, Any], settings: dict[str, Any]) -> Ready:
        return Ready(state, settings, self._newest.generation if self._newest else 0)

    def _fence(self, generation: int, cause: str) -> None:
        self._fenced_generation = max(self._fenced_generation, generation)
        world = self._world
        if not self._stop and world is not None and generation >= world.generation:
            self._stop, self._cause = True, cause
        self._changed.notify_all()

    def _end(self, why: Exit | ResilientError) -> None:
        if self._over is None:
            self._over, self._over_at = why, time.monotonic()
            self._stop = True
            self._changed.notify_all()

    def _raise(self) -> NoReturn:
        over = self._over
        if over is None:
            raise Fenced(self._cause)
        self._over_at = None  # the main thread knows, and ends the process
        if isinstance(over, ResilientError):
            raise over.with_traceback(None)
        if not over.error:
            raise SystemExit(over.code)
        raise _named(over.error)(over.message)

    # What follows runs on the watchdog thread.

    def _watch(self) -> None:
        try:
            self._loop()
        except ResilientError as error:
            with self._changed:
                self._end(error)
            self._cut()
            self._end_if_stuck(wait=True)
        except BaseException:
            # The main thread must not train on without its watchdog.
            with self._changed:
                self._end(ResilientError("the watchdog thread failed; see its traceback above"))
            raise
        finally:
            self._link.close()

    def _loop(self) -> None:
        environment = self._environment
        last, next_beat, connections = _clock(), 0.0, 0
        while True:
            messages, _ = self._link.wait(_SAMPLE_SECONDS)
            now = _clock()
            if now - last > environment.heartbeat_timeout:
                self._stood_still(now - last)
            last = now
            self._cut()
            for message in messages:
                self._obey(message)
            self._cut()
            if connections != self._link.connections:
                connections, next_beat = self._link.connections, 0.0
                with self._changed:
                    self._outbox = list(self._standing)
            self._flush()
            if self._closing:
                return
            self._busy.sample()
            if now >= next_beat or self._beat_wanted:
                next_beat = now + environment.heartbeat_interval
                self._beat()
            self._wait_no_longer()
            self._end_if_stuck()

    def _stood_still(self, seconds: float) -> None:
        """A stopped process has been given up by the others: it must not act on what it knows."""
        with self._changed:
            if self._world is None or self._waiting:
                return
            generation = self._world.generation
            cause = f"this process stood still for {seconds:.1f} s"
            self._fence(generation, cause)
            self._say(Evidence(generation, cause))

    def _obey(self, order: FromServer) -> None:
        with self._changed:
            if isinstance(order, Fence):
                self._fence(order.generation, order.cause)
            elif isinstance(order, Seated):
                if self._newest is None or order.generation > self._newest.generation:
                    self._newest = self._offered = order
                    self._bits, self._leaving = 0, ()
                    self._changed.notify_all()
            elif isinstance(order, BoundaryOrder):
                self._bits, self._leaving = order.bits, order.leaving
            elif isinstance(order, Exit):
                self._end(order)
            elif isinstance(order, WhereQuery):
                self._outbox.append(Whereabouts(*self._busy.where()))
            # Whatever else a later coordinator may say is not for us.

    def _cut(self) -> None:
        now = time.monotonic()
        if not self._stop or self._waiting or self._world is None:
            self._next_cut = 0.0
        elif now >= self._next_cut:
            # Again and again: a connection may have been in the making at the first cut.
            self._next_cut = now + _CUT_AGAIN_SECONDS
            self.on_fence()

    def _flush(self) -> None:
        with self._changed:
            messages, self._outbox = self._outbox, []
        for message in messages:
            self._link.send(message)

    def _beat(self) -> None:
        with self._changed:
            generation = self._world.generation if self._world else 0
            report = dict(self._report)
        self._link.send(Beat(generation, self.progress, self._busy.take(), report))
        with self._changed:
            self._beat_wanted = False
            self._changed.notify_all()

    def _wait_no_longer(self) -> None:
        """Training goes on without a coordinator; waiting for a seat does not."""
        limit = self._environment.coordinator_timeout
        if self._link.absent_seconds <= limit:
            return
        with self._changed:
            if self._waiting:
                self._end(
                    CoordinatorLostError(
                        f"the coordinator {self._link.address} was away for {limit:g} s "
                        f"({self._link.last_error or 'no answer'}); start it again at this address"
                    )
                )

    def _end_if_stuck(self, wait: bool = False) -> None:
        """Ends the process if the main thread does not come to hear that it is over."""
        while True:
            over_at, over = self._over_at, self._over
            if over_at is None or over is None:
                return
            if time.monotonic() - over_at > self._environment.fence_timeout:
                break
            if not wait:
                return
            time.sleep(_SAMPLE_SECONDS)
        _, at = self._busy.where()
        told = over.message if isinstance(over, Exit) else str(over)
        print(
            f"node {self.node}: {told}; the main thread did not end within "
            f"{self._environment.fence_timeout:g} s, it is in {at}",
            file=sys.stderr,
            flush=True,
        )
        os._exit((over.code if isinstance(over, Exit) else 1) or 1)

    def _hello(self) -> Hello:
        with self._changed:
            world, step = self._newest, self._step()
            if world is None or world.rank >= len(world.seats):  # without a seat in it: a donor
                held = None
            else:
                taken = world is self._world
                over = self._waiting or self._stop if taken else self._offered is None
                held = HeldWorld(
                    generation=world.generation,
                    formed=world.times["formed"],
                    seats=self._places(world),
                    step=step,
                    training=not over and world.generation > self._fenced_generation,
                )
        return Hello(
            role=WORKER,
            node=self._environment.node,
            id=self._id,
            local_rank=self._environment.local_rank,
            local_world=self._environment.local_world,
            pid=os.getpid(),
            world=held,
        )

    @staticmethod
    def _places(world: World) -> tuple[Seat, ...]:
        # Who sits where is all that a coordinator needs; states are many times as long.
        return tuple(Seat(seat.node, seat.local_rank, {}) for seat in world.seats)

    def _step(self) -> int:
        step = self._report.get("step", 0)
        return step if isinstance(step, int) else 0


def _named(name: str) -> type[ResilientError]:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ResilientError):
        return kind
    return ResilientError


def _clock() -> float:
    # Goes on while the machine sleeps, unlike the monotonic clock.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
