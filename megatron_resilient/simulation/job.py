"""The event loop: one job of one system, through one trace.

Time runs from change to change. In between, training is a regular sequence of steps and saves, of
which all but the last few are taken in one go, so that a run costs a few operations a change.
"""

import math
from dataclasses import dataclass
from enum import Enum

from megatron_resilient.algorithms.lost_tokens import DynamicK
from megatron_resilient.simulation.accounts import Accounts
from megatron_resilient.simulation.policy import Fate, Policy, World
from megatron_resilient.simulation.saves import Restored, Saves
from megatron_resilient.simulation.trace import Change, Trace

# A step that ends at the very moment of a failure has ended: times are sums of floats.
_ROUNDING = 1e-9


class Phase(Enum):
    """What a job is doing."""

    TRAINING = "training"
    DOWN = "down"
    WAITING = "waiting"


@dataclass(frozen=True)
class Settings:
    """How a job saves.

    Attributes:
        interval: steps between two saves.
        k: experts of each layer in a save, at first.
        lost_tokens: share of lost tokens that K is doubled for; 0: K stays.
        adapts: a world that is so fast, or so small, that a save takes more than the interval saves
            as often as it can without waiting.
    """

    interval: int
    k: int
    lost_tokens: float = 0.0
    adapts: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        accounts: its seconds and steps.
        interruptions: times that it stopped because nodes were lost or left.
        joins: times that it stopped to take nodes in.
        rollbacks: times that all state went back to a checkpoint.
        expert_restores: times that only experts did.
        lost_tokens: whose updates are gone, as a share of all that were trained.
        k: experts of each layer in a save, at last.
    """

    accounts: Accounts
    interruptions: int
    joins: int
    rollbacks: int
    expert_restores: int
    lost_tokens: float
    k: int


class Job:
    """A job that runs through a trace."""

    def __init__(self, trace: Trace, policy: Policy, settings: Settings) -> None:
        """Makes the job; `run` runs it."""
        self._trace = trace
        self._policy = policy
        self._settings = settings
        self._loads = policy.workload.loads
        planned = max(1, int(trace.seconds / policy.undisturbed_step_seconds))
        self._planned_steps = planned
        limit = settings.lost_tokens or 1.0
        self._dynamic = DynamicK(policy.workload.experts, settings.k, limit)
        self._saves = Saves(self._loads, planned, self._dynamic)
        self._accounts = Accounts()
        self._now = 0.0
        self._phase = Phase.WAITING
        self._world: World | None = None  # the last one that trained, or whose state is still there
        self._next = World(())  # the one that is being formed
        self._in_use: frozenset[str] = frozenset()  # the nodes of `_world` while it trains
        self._gone: set[str] = set()  # of `_world`, without having given anything away
        self._alive: dict[str, None] = dict.fromkeys(trace.start)
        self._fate = Fate(False)  # of what `_gone` took
        self._ready_at = 0.0
        self._join_at: float | None = None
        self._step_seconds = 0.0
        self._interval = settings.interval
        self._last_begun = -1  # step of the newest save
        self._into = 0.0  # seconds that the present step has taken so far
        self._stall = 0.0  # seconds that training still waits for the save that just began
        self._interruptions = self._joins = self._rollbacks = self._expert_restores = 0
        self._lost_tokens = 0

    def run(self) -> Outcome:
        """Runs the job to the end of the trace."""
        if self._enough():
            self._next = self._policy.form(tuple(self._alive), None, ())
            self._begin_training()
        for change in self._trace.changes:
            self._advance(change.seconds)
            self._take(change)
        self._advance(self._trace.seconds)
        self._accounts.productive += self._into
        routed = sum(map(sum, self._loads)) * self._accounts.steps
        return Outcome(
            self._accounts,
            self._interruptions,
            self._joins,
            self._rollbacks,
            self._expert_restores,
            self._lost_tokens / routed if routed else 0.0,
            self._dynamic.k,
        )

    # Changes of members.

    def _take(self, change: Change) -> None:
        """Plays one change; time has come to it."""
        for node in (*change.lost, *change.left):
            del self._alive[node]
        self._alive |= dict.fromkeys(change.joined)
        if change.joined:
            self._join_at = self._now + self._policy.join_window_seconds
        if self._phase is Phase.WAITING:
            if self._enough():
                self._start_again()
            return
        lost, left = self._involved(change.lost), self._involved(change.left)
        if lost or left:
            self._stop(lost, left)

    def _involved(self, nodes: tuple[str, ...]) -> set[str]:
        """Returns those of some nodes that train, or are waited for to do so."""
        if self._phase is Phase.TRAINING:
            return {node for node in nodes if node in self._in_use}
        return {node for node in nodes if node in self._nodes() or node in self._next.nodes}

    def _stop(self, lost: set[str], left: set[str]) -> None:
        """Ends training, or a recovery, because nodes are gone, and starts a recovery."""
        self._interruptions += 1
        if self._phase is Phase.TRAINING:
            self._break_step()
            self._fate = Fate(False)
            if not lost and not self._policy.system.keeps_state:
                self._take_final_save()
        gone = self._gone | lost.intersection(self._nodes())
        if not self._enough():
            if self._world is not None:
                self._roll_back()
            self._phase, self._world, self._gone = Phase.WAITING, None, set()
            return
        if self._world is None:  # it was starting from the checkpoint, and starts anew
            self._start_again()
            return
        if gone != self._gone:
            self._gone = gone
            self._suffer(self._policy.fate(self._world, gone))
        self._next = self._policy.form(self._candidates(), self._world, self._gone)
        if lost or self._gone:
            seconds = self._policy.recovery_seconds(self._fate, self._next)
        else:  # nothing has to be noticed first
            seconds = self._policy.join_seconds(self._next)
        self._ready_at = self._now + seconds
        self._phase = Phase.DOWN

    def _suffer(self, fate: Fate) -> None:
        """Takes from a checkpoint what a loss took."""
        self._fate = fate
        if fate.rolls_back:
            self._roll_back()
        elif fate.experts:
            self._expert_restores += 1
            lost = self._saves.restore_experts(fate.experts, self._accounts.steps)
            self._note_lost(lost)

    def _start_again(self) -> None:
        """Starts all processes, from the newest checkpoint."""
        self._world, self._gone = None, set()
        self._next = self._policy.form(tuple(self._alive), None, ())
        self._ready_at = self._now + self._policy.start_seconds(self._next)
        self._phase = Phase.DOWN

    def _roll_back(self) -> None:
        """Goes back to the newest checkpoint, unless that is where training is."""
        self._rollbacks += 1
        self._saves.interrupt(self._now)
        if self._saves.durable_step < self._accounts.steps:
            self._accounts.lose(self._saves.durable_step)
            self._note_lost(self._saves.roll_back())

    def _note_lost(self, lost: Restored) -> None:
        """Counts lost tokens, and raises K if restores go on like this."""
        self._lost_tokens += lost.tokens
        if self._settings.lost_tokens:
            restores = self._rollbacks + self._expert_restores
            remaining = restores * max(0.0, self._trace.seconds / self._now - 1)
            interval = self._interval
            self._dynamic.on_fault(lost.share, interval, self._planned_steps, remaining)

    def _break_step(self) -> None:
        """Gives up the step, and the saves, that are not complete."""
        self._accounts.lost += self._into
        self._into = self._stall = 0.0
        self._saves.interrupt(self._now)

    def _take_final_save(self) -> None:
        """Notes that all steps are saved: training was told before, saved, and ended."""
        self._saves.saved_at_leaving(self._accounts.steps)
        self._accounts.keep(self._accounts.steps)

    def _join(self) -> None:
        """Stops between two steps, because nodes have joined."""
        self._joins += 1
        self._saves.interrupt(self._now)
        self._fate = Fate(False)
        if not self._policy.system.keeps_state:
            self._take_final_save()
        self._next = self._policy.form(self._candidates(), self._world, ())
        self._ready_at = self._now + self._policy.join_seconds(self._next)
        self._phase = Phase.DOWN

    def _begin_training(self) -> None:
        self._world, self._gone = self._next, set()
        self._phase = Phase.TRAINING
        nodes = len(self._world.nodes)
        self._step_seconds = self._policy.step_seconds(nodes)
        self._interval = self._settings.interval
        if self._settings.adapts:
            persist = self._policy.persist_seconds(self._saves.k, nodes)
            self._interval = max(self._interval, math.ceil(persist / self._step_seconds))
        self._in_use = frozenset(self._world.nodes)
        if self._alive.keys() <= self._in_use:
            self._join_at = None
        elif self._join_at is None:
            self._join_at = self._now

    def _enough(self) -> bool:
        return self._policy.used(len(self._alive)) >= self._policy.least_nodes

    def _nodes(self) -> tuple[str, ...]:
        return self._world.nodes if self._world else ()

    def _candidates(self) -> tuple[str, ...]:
        """Returns the nodes that are there, those of the last world first, in its order."""
        old = [node for node in self._nodes() if node in self._alive]
        known = set(old)
        return (*old, *(node for node in self._alive if node not in known))

    def _may_grow(self) -> bool:
        return self._policy.used(len(self._alive)) > len(self._nodes())

    # Time.

    def _advance(self, until: float) -> None:
        """Lets time pass."""
        while self._now < until:
            if self._phase is Phase.WAITING:
                self._accounts.idle += until - self._now
                self._now = until
            elif self._phase is Phase.DOWN:
                reached = min(until, self._ready_at)
                self._accounts.recovery += reached - self._now
                self._now = reached
                if self._now >= self._ready_at:
                    self._begin_training()
            else:
                self._train(until)

    def _train(self, until: float) -> None:
        """Trains up to a time, or to the moment when nodes are taken in."""
        if self._stall:
            waited = min(self._stall, until - self._now)
            self._accounts.stalled += waited
            self._stall -= waited
            self._now += waited
            if self._stall:
                return
        joining = self._join_at is not None and self._may_grow()
        at_step = joining and self._policy.system.keeps_state
        if joining and self._now >= (self._join_at or 0.0) and not self._into:
            just_saved = self._accounts.steps == self._last_begun
            if at_step or just_saved:
                self._join()
                return
        interval, step = self._interval, self._step_seconds
        to_save = interval - self._accounts.steps % interval
        if at_step:
            # No further than to the end of the step in which the window of arrivals closes.
            left = max(0.0, (self._join_at or 0.0) - self._now) + self._into
            to_save = min(to_save, max(1, math.ceil(left / step - _ROUNDING)))
        seconds = to_save * step - self._into
        if self._now + seconds > until:
            spent = self._into + (until - self._now)
            done = min(int(spent / step + _ROUNDING), to_save - 1)
            self._accounts.work(done, step)
            self._into = max(0.0, spent - done * step)
            self._now = until
            return
        self._accounts.work(to_save, step)
        self._into = 0.0
        self._now += seconds
        if self._accounts.steps % interval == 0:
            if not joining and self._saves.begun:
                self._skip(until)
            self._save()

    def _save(self) -> None:
        """Begins a save."""
        nodes, k = len(self._nodes()), self._saves.k
        persist = self._policy.persist_seconds(k, nodes)
        self._stall = self._stall_seconds(k, nodes)
        self._last_begun = self._accounts.steps
        self._saves.begin(self._accounts.steps, self._now + self._stall + persist)

    def _stall_seconds(self, k: int, nodes: int) -> float:
        """Returns how long training waits: for the copy, and for the save before."""
        every = self._interval * self._step_seconds
        behind = self._policy.persist_seconds(k, nodes) - every
        return max(self._policy.stall_seconds(k, nodes), behind)

    def _skip(self, until: float) -> None:
        """Takes all saves, and the steps after them, in one go but those that may still matter."""
        nodes, k = len(self._nodes()), self._saves.k
        stall = self._stall_seconds(k, nodes)
        cycle = stall + self._interval * self._step_seconds
        cycles = int((until - self._now) / cycle) - self._saves.remembered - 4
        if cycles <= 0:
            return
        self._accounts.stalled += cycles * stall
        self._accounts.work(cycles * self._interval, self._step_seconds)
        self._saves.skip(cycles)
        self._now += cycles * cycle
        # Two saves may be on their way; what is older is durable.
        self._accounts.keep(self._accounts.steps - 3 * self._interval)
