"""Who is a member: the one place that decides it.

A state machine without clock, sockets or threads: events come in with the time, orders go out. A
generation is `live` from its forming until it is over (fenced, or paused at a boundary). Only when
every member that is not lost is `ready`, the next one is formed; so nobody is ever in two.
"""

from typing import Any

from megatron_resilient.elastic.decisions.arrivals import meet_agent, meet_worker
from megatron_resilient.elastic.decisions.boundary import ask_for_boundary, close_boundary
from megatron_resilient.elastic.decisions.end import end_if_done
from megatron_resilient.elastic.decisions.forming import form
from megatron_resilient.elastic.decisions.hearing import hear_agent, hear_user, hear_worker
from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.status import describe
from megatron_resilient.elastic.decisions.watch import (
    notice_hang,
    notice_silence,
    notice_stragglers,
    notice_stuck,
)
from megatron_resilient.elastic.messages import AGENT, CLIENT, WORKER, Beat, Hello, ToServer
from megatron_resilient.elastic.orders import CloseStore, OpenStore, Order
from megatron_resilient.elastic.roster import Agent, Process
from megatron_resilient.elastic.rules import Rules

_STORE_PAUSE_SECONDS = 1.0


class Membership:
    """The members of one job. Every event returns the orders that follow from it, in order.

    What depends on all members is decided at the end of an event, in time that grows with them. An
    event that comes with `more` leaves that to the next one, or to `tick`: of a thousand messages
    that are there at once, only the last needs it.
    """

    def __init__(self, rules: Rules, now: float, unix_offset: float = 0.0) -> None:
        """Starts without members; a job that lives already makes itself known.

        Args:
            rules: The limits.
            now: The clock, in seconds; it must never run backwards.
            unix_offset: What to add to the clock to have seconds since 1970.
        """
        self._job = Job(rules, now, unix_offset)
        self._ticked = now
        self._stood_still = 0.0  # for so many seconds, in all
        self._roles: dict[int, str] = {}  # by connection
        self._store_wanted = 0
        self._store_retry = 0.0

    @property
    def generation(self) -> int:
        """Number of the latest generation; 0 before the first."""
        return self._job.generation

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._job.ended is not None

    def connected(
        self, now: float, key: int, hello: Hello, host: str, more: bool = False
    ) -> list[Order]:
        """Somebody proved that it knows the token, and was welcomed.

        Args:
            now: The clock.
            key: The connection; never used twice.
            hello: What it said.
            host: Our own address on that connection.
            more: See the class.
        """
        now = self._advance(now)
        self._job.by_key[key], self._roles[key] = None, hello.role
        if hello.role == AGENT:
            meet_agent(self._job, now, key, hello)
        elif hello.role == WORKER:
            meet_worker(self._job, now, key, hello, host)
        return self._orders() if more else self._settle(now)

    def disconnected(
        self, now: float, key: int, proven: bool = True, more: bool = False
    ) -> list[Order]:
        """A connection ended.

        Args:
            now: The clock.
            key: The connection.
            proven: The other machine said so. It is silence if packets were only unanswered.
            more: See the class.
        """
        now = self._advance(now)
        self._roles.pop(key, None)
        who = self._job.by_key.pop(key, None)
        if isinstance(who, Agent):
            del self._job.agents[who.hello.node]
        elif isinstance(who, Process) and who.key == key:
            who.key, who.lost_at, who.proven = None, now, proven
            if who.finished is not None and not who.member:
                self._job.processes.pop(who.hello.id, None)
        return self._orders() if more else self._settle(now)

    def received(self, now: float, key: int, message: ToServer, more: bool = False) -> list[Order]:
        """A message came.

        Args:
            now: The clock.
            key: The connection.
            message: What it says.
            more: See the class.

        Raises:
            ProtocolError: It is not for this sender to say, or its content is wrong. Nothing has
                changed; the connection is to be closed.
        """
        now = self._advance(now)
        who = self._job.by_key.get(key)
        if who is not None:
            who.heard = now
        if isinstance(who, Process):
            hear_worker(self._job, now, who, message)
        elif isinstance(who, Agent):
            hear_agent(self._job, now, who, message)
        elif self._roles.get(key) == CLIENT:
            hear_user(self._job, now, key, message)
        # Else it was dismissed, and had not heard of it yet.
        # Most of what comes are heartbeats. What follows from them has time until the next tick.
        return self._orders() if more or isinstance(message, Beat) else self._settle(now)

    def store_opened(self, now: float, generation: int, port: int) -> list[Order]:
        """The store that was ordered for a generation listens."""
        now = self._advance(now)
        if generation == self._job.next_generation:
            self._job.store_port = port
        else:
            self._job.orders.append(CloseStore(generation))
        return self._settle(now)

    def store_failed(self, now: float, generation: int, why: str) -> list[Order]:
        """That store could not be started; it is tried again."""
        now = self._advance(now)
        self._job.log(f"no store for generation {generation}: {why}; trying again")
        if generation == self._store_wanted:
            self._store_wanted, self._store_retry = 0, now + _STORE_PAUSE_SECONDS
        return self._settle(now)

    def tick(self, now: float) -> list[Order]:
        """Time passes; to be called several times per heartbeat interval."""
        now = self._advance(now)
        return self._settle(now)

    def describe(self, now: float) -> dict[str, Any]:
        """Returns the answer to `status`, as plain values."""
        return describe(self._job, now - self._stood_still)

    def _advance(self, now: float) -> float:
        """Returns the job's time: it stands still while we do."""
        gap = now - self._ticked
        self._ticked = now
        if gap > max(1.0, 2 * self._job.limits.heartbeat_interval):
            # What the others said meanwhile is still to be read.
            self._job.log(f"the coordinator stood still for {gap:.1f} s; no limit counts it")
            self._stood_still += gap
            self._job.unix_offset += gap
        return now - self._stood_still

    def _settle(self, now: float) -> list[Order]:
        """Does everything that can be done now, and returns the orders of this event."""
        if self._job.ended is None:
            notice_silence(self._job, now)
            close_boundary(self._job, now)
            notice_stuck(self._job, now)
            notice_hang(self._job, now)
            notice_stragglers(self._job, now)
            end_if_done(self._job)
        if self._job.ended is None:
            self._open_store(now)
            form(self._job, now)
            ask_for_boundary(self._job, now)
        return self._orders()

    def _orders(self) -> list[Order]:
        orders, self._job.orders = self._job.orders, []
        return orders

    def _open_store(self, now: float) -> None:
        # One ahead, so that a recovery does not wait for it.
        wanted = self._job.store_port is None and self._store_wanted != self._job.next_generation
        if wanted and self._job.processes and now >= self._store_retry:
            self._store_wanted = self._job.next_generation
            self._job.orders.append(OpenStore(self._job.next_generation))
