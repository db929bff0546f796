"""Faults on demand: what to break, where and when, as users and tests ask for it.

    --resilient-fault "kill node=1 step=12"
    --resilient-fault "hang node=node2 step=20 phase=save"
    --resilient-fault "random mtbf=60 seed=7 nodes=8 kinds=kill-node,hang,leave"

Several are separated by semicolons. A fault without a step strikes at the first point of its phase;
each strikes once: whoever comes back after one takes up those of later steps.
"""

import contextlib
import math
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_resilient.errors import ConfigError

# What each kind does to the process that it strikes.
KINDS = {
    "kill": "SIGKILL to the training process",
    "kill-node": "SIGKILL to the node's agent, and with it to its training processes",
    "hang": "SIGSTOP to the training process",
    "stuck": "the main thread sleeps for ever, the watchdog beats on",
    "exception": "a Python exception in the training process",
    "slow": "each microbatch takes `seconds` longer for `steps` steps",
    "cut": "all connections of the process end, and it reaches nobody for `seconds`",
    "leave": "SIGTERM to the node's agent: a planned departure",
}
PHASES = (
    "begin",  # a step begins
    "forward",  # of the first microbatch
    "backward",  # gradients of the first microbatch are on their way
    "replicas",  # gradients of replicas are on their way while the backward pass goes on
    "gradients",  # all gradients of this rank are computed and summed
    "commit",  # just before all agree on the step
    "committed",  # just after it: nothing is updated yet
    "updated",  # weights are updated
    "evaluate",
    "save",  # a save begins
    # Of a save in the per-expert format, whose step it is that counts:
    "copied",  # the copy in host memory is complete
    "written",  # all files are there, the manifest is not
    "saved",  # the manifest is there
    "migration",  # experts are being moved
    "recovery",  # a new generation is formed, nothing is built
    "refill",  # the new model is built, state is about to be copied
    "leaving",  # state was handed over
)
_RANDOM_KINDS = ("kill", "kill-node", "hang", "exception", "leave")
_HORIZON_SECONDS = 30 * 86400.0


class InjectedError(RuntimeError):
    """What the fault `exception` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of KINDS.
        node: node id, or its number.
        local_rank: which of the node's processes.
        phase: one of PHASES.
        step: in or after which step; None: the first time.
        at_seconds: strikes at the first point after this time since the job began, whatever the
            phase; None: by phase and step.
        seconds: of `slow` and `cut`.
        steps: of `slow`.
    """

    kind: str
    node: str
    local_rank: int = 0
    phase: str = "forward"
    step: int | None = None
    at_seconds: float | None = None
    seconds: float = 1.0
    steps: int = 1_000_000_000

    def strikes(self, node: str, local_rank: int) -> bool:
        """Whether it is meant for this process."""
        number = re.search(r"(\d+)$", node)
        named = node == self.node or (number is not None and str(int(number[1])) == self.node)
        return named and local_rank == self.local_rank


def parse_faults(flag: str | None) -> list[Fault]:
    """Reads the value of `--resilient-fault`.

    Raises:
        ConfigError: one that cannot be read; says which word.
    """
    faults: list[Fault] = []
    for text in (flag or "").split(";") if flag is not None else ():
        kind, *words = text.split() or [""]
        values = dict(word.partition("=")[::2] for word in words)
        with _named(text.strip()):
            if kind == "random":
                faults += _random_faults(values)
            elif kind in KINDS:
                faults.append(_fault(kind, values))
            else:
                raise ValueError(f"{kind!r} is none of {', '.join((*KINDS, 'random'))}")
    return faults


@contextlib.contextmanager
def _named(text: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(f'--resilient-fault "{text}": {error}') from None


def _fault(kind: str, values: dict[str, str]) -> Fault:
    known = {"node", "local_rank", "phase", "step", "seconds", "steps"}
    if unknown := values.keys() - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}")
    if "node" not in values:
        raise ValueError("node=... is missing")
    phase = values.get("phase", "forward")
    if phase not in PHASES:
        raise ValueError(f"phase={phase} is none of {', '.join(PHASES)}")
    return Fault(
        kind,
        values["node"],
        local_rank=int(values.get("local_rank", "0")),
        phase=phase,
        step=int(values["step"]) if "step" in values else None,
        seconds=_positive(values, "seconds", 1.0),
        steps=int(values.get("steps", "1000000000")),
    )


def _random_faults(values: dict[str, str]) -> list[Fault]:
    """Draws exponential times between faults; the same on every node."""
    known = {"mtbf", "seed", "nodes", "kinds"}
    if unknown := values.keys() - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}")
    mean, nodes = _positive(values, "mtbf", None), int(_positive(values, "nodes", None))
    kinds = values.get("kinds", ",".join(_RANDOM_KINDS)).split(",")
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kinds={','.join(wrong)}: known are {', '.join(KINDS)}")
    draw = random.Random(int(values.get("seed", "0")))
    faults = []
    at = draw.expovariate(1 / mean)
    while at < min(_HORIZON_SECONDS, 10_000 * mean):
        node = str(draw.randrange(nodes))
        faults.append(Fault(draw.choice(kinds), node, at_seconds=at))
        at += draw.expovariate(1 / mean)
    return faults


def _positive(values: dict[str, str], name: str, default: float | None) -> float:
    if name not in values and default is None:
        raise ValueError(f"{name}=... is missing")
    number = float(values.get(name, str(default)))
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name}={number:g} must be a positive number")
    return number


def _is_to_come(fault: Fault, passed: float, done: int | None) -> bool:
    if fault.at_seconds is not None:
        return fault.at_seconds > passed
    return done is None or (fault.step is not None and fault.step > done + 1)


class FaultInjector:
    """Strikes this process when its time has come.

    Args:
        faults: all of the job.
        node: this process's node.
        local_rank: its number there.
        began: Unix time in seconds at which the job began; earlier random faults were for a
            process before this one.
        cut: cuts this process off for the given seconds.
        tell: tells the coordinator how far this process is, so that the fault does not strike the
            process that comes in its place.
        done: steps that were done when this process joined the job; faults up to the step after
            were for a process before this one, and so were those without a step. None if it was
            there at the start.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        node: str,
        local_rank: int,
        began: float,
        cut: Callable[[float], None],
        tell: Callable[[], None],
        done: int | None = None,
    ):
        passed = time.time() - began
        self._began = began
        self._cut = cut
        self._tell = tell
        self._waiting = [
            fault
            for fault in faults
            if fault.strikes(node, local_rank) and _is_to_come(fault, passed, done)
        ]
        self._slow: tuple[float, int] | None = None  # (seconds, last step)

    @property
    def is_armed(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._waiting) or self._slow is not None

    def point(self, phase: str, step: int) -> None:
        """Says that the main thread passes a point; a fault that is due strikes.

        Args:
            phase: one of PHASES.
            step: the step in progress, or the last one between steps.
        """
        passed = time.time() - self._began
        for fault in list(self._waiting):
            due = (
                fault.at_seconds <= passed
                if fault.at_seconds is not None
                else fault.phase == phase and (fault.step is None or fault.step == step)
            )
            if due:
                self._waiting.remove(fault)
                self._strike(fault, step)
        if phase == "forward" and self._slow is not None:
            seconds, last = self._slow
            if step > last:
                self._slow = None
            else:
                time.sleep(seconds)

    def _strike(self, fault: Fault, step: int) -> None:
        self._tell()
        # To the second: what a log shows is when it struck.
        print(f"fault injected: {fault.kind} node={fault.node} step={step}", flush=True)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "kill-node":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # our agent's death is ours
        elif fault.kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "stuck":
            while True:
                time.sleep(3600)
        elif fault.kind == "exception":
            raise InjectedError(f"injected at step {step}")
        elif fault.kind == "slow":
            self._slow = (fault.seconds, step + fault.steps - 1)
        elif fault.kind == "leave":
            os.kill(os.getppid(), signal.SIGTERM)
        elif fault.kind == "cut":
            self._cut(fault.seconds)
