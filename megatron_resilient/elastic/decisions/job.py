"""All that the coordinator knows of the job that it decides about."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from megatron_resilient.elastic.messages import Exit, FromServer, Seated
from megatron_resilient.elastic.orders import Close, End, Log, Order, Record, Send
from megatron_resilient.elastic.roster import Agent, Process, Roster, Slot
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.stragglers import Stragglers


class Job:
    """What is known, and the orders that follow from the event at hand.

    Plain data: the functions of this package change it. Times are the coordinator's clock, in
    seconds, unless something else is said.
    """

    def __init__(self, rules: Rules, now: float, unix_offset: float) -> None:
        """Starts without members; for the arguments see `Membership`."""
        self.rules = rules
        self.limits = rules.limits
        self.unix_offset = unix_offset
        self.started = now
        self.orders: list[Order] = []
        self.ended: End | None = None
        # Who is there:
        self.processes = Roster()  # by process id
        self.agents: dict[str, Agent] = {}  # by node; only those that are connected
        # By connection; None if whoever had it was dismissed, or is a user.
        self.by_key: dict[int, Process | Agent | None] = {}
        # By process id: what whoever is out for good is told when it comes back.
        self.dismissed: dict[str, Exit] = {}
        self.leaving: set[str] = set()  # nodes
        self.left_at = now  # when the last of them said so
        # Those that the latest order of a boundary names, and those that the boundary lets go for
        # sure: what the first order named, and what members said that they agreed on.
        self.announced: frozenset[str] = frozenset()
        self.departing: frozenset[str] = frozenset()
        # What all must be started with, and the grid [tp, cp, pp]:
        self.settings: tuple[dict[str, Any], tuple[int, ...]] | None = None
        # The latest generation:
        self.generation = 0
        self.next_generation = 1
        self.store_port: int | None = None  # of the store for `next_generation`
        self.formed = 0.0  # seconds since 1970
        self.formed_here = False  # by us, not by a predecessor
        self.seated: dict[str, Seated] = {}  # by process id: what it was told
        self.slots: tuple[Slot, ...] = ()  # by rank
        self.live = False
        self.final = False  # it is there to save, and to end
        self.cause = "start"  # of its forming; from its end on, of the next one's
        self.pausing = False  # it was asked for a boundary
        self.awaited: set[Slot] = set()  # seats that nobody claimed since our restart
        self.awaited_until = 0.0
        self.newest_step = 0  # that anybody reported in the latest generation that reported any
        self.newest_step_of = 0  # that generation
        # Its end:
        self.evidence_at = 0.0  # seconds since 1970
        self.last_sign = 0.0  # the same; 0 if nobody fell silent
        self.fence_text = ""
        self.out_until: float | None = None  # then members must be out, or at the boundary
        self.lost: dict[str, bool] = {}  # node -> whether its death is proven
        self.left: set[str] = set()  # nodes that left as planned
        self.short_since: float | None = None
        self.short_of = ""
        self.ending: Exit | None = None  # what ends the job once its state is saved
        self.last_recovery: dict[str, Any] | None = None  # for `status`
        # Watching:
        self.progress_at = now
        self.asked_at: float | None = None  # when all were asked where they are
        self.window_at = now
        self.stragglers = Stragglers(rules.straggler_ratio, rules.straggler_windows)

    # Who is there.

    def members(self) -> list[Process]:
        """Returns the members that are neither lost nor done."""
        return [p for p in self.processes.values() if p.member and p.finished is None]

    def givers(self) -> list[Process]:
        """Returns those without a seat that are giving what they hold, and are not done."""
        return [p for p in self.processes.values() if p.gives and p.finished is None]

    def is_needed(self, process: Process) -> bool:
        """Tells whether the job may still need what a process holds.

        Members are; so is who had to give up its seat, until a step was done without it.
        """
        if process.member or process.gives:
            return True
        state = process.ready.state if process.ready else {}
        if "step" not in state:
            return False
        if self.newest_step_of == self.generation:
            return bool(state["step"] == self.newest_step)
        # It can complete the step whose gradients it has ready.
        return bool(state["step"] + bool(state.get("ready")) >= self.newest_step)

    def complete(self) -> list[Process]:
        """Returns the waiting workers of the nodes of which all workers wait, or have seats."""
        there: defaultdict[str, list[Process]] = defaultdict(list)
        for process in self.processes.values():
            if process.waits or (process.member and process.finished is None):
                there[process.node].append(process)
        return [
            process
            for workers in there.values()
            if len(workers) == workers[0].hello.local_world
            for process in workers
            if process.waits
        ]

    def quiet(self, now: float, ready: list[Process]) -> bool:
        """Tells whether somebody is ready, and nobody came within the window."""
        arrivals = [process.arrived for process in self.processes.values()]
        return bool(ready) and now - max(arrivals) >= self.limits.join_window

    def is_young(self, now: float) -> bool:
        """Tells whether members of a job that lives may not have found us yet."""
        held_off = max(self.limits.join_window, 3 * self.limits.heartbeat_interval)
        return not self.generation and now - self.started < held_off

    def least_nodes(self) -> int:
        """Returns how many nodes it takes to train."""
        told = self.settings[0].get("min_nodes") if self.settings else None
        return max(self.rules.min_nodes, told if isinstance(told, int) else 1)

    def most_nodes(self) -> int | None:
        """Returns with how many nodes the start waits for no more; None if that is not known."""
        told = self.settings[0].get("max_nodes") if self.settings else None
        return self.rules.max_nodes or (told if isinstance(told, int) else None)

    def step(self) -> int | None:
        """Returns the newest step that those who are there reported; None if none did."""
        steps = [p.report.get("step") for p in self.processes.values()]
        return max((step for step in steps if type(step) is int and step >= 0), default=None)

    # What is ordered.

    def send(self, key: int, message: FromServer) -> None:
        """Sends on a connection."""
        self.orders.append(Send(key, message))

    def hang_up(self, key: int) -> None:
        """Closes a connection that a newer one replaces."""
        self.by_key.pop(key, None)
        self.orders.append(Close(key))

    def log(self, text: str) -> None:
        """Tells people."""
        self.orders.append(Log(text))

    def record(self, event: str, **fields: Any) -> None:
        """Writes an event of `telemetry`."""
        self.record_each(event, [fields])

    def record_each(self, event: str, each: Iterable[dict[str, Any]]) -> None:
        """Writes several events of one kind; the step is looked up once for all of them."""
        step = self.step()
        self.orders += [Record(event, self.generation, step, fields) for fields in each]
