"""What all processes of a job must agree on: flags, and the grid of tensor, context, pipeline."""

from typing import Any

from megatron_resilient.elastic.decisions.job import Job
from megatron_resilient.elastic.decisions.loss import lose
from megatron_resilient.elastic.messages import Exit, Ready
from megatron_resilient.elastic.roster import Process
from megatron_resilient.errors import ProtocolError


def check_state(state: dict[str, Any]) -> tuple[int, ...]:
    """Returns the grid of a state, if the parts that are read here are what they must be.

    Raises:
        ProtocolError: they are not.
    """
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


def agree(job: Job, process: Process, ready: Ready) -> None:
    """Lets the first that is ready say what all others must have been started with."""
    if not job.generation and not any(
        other.ready and other.finished is None and other is not process
        for other in job.processes.values()
    ):
        job.settings = None  # nothing is begun, and whoever said it is gone
    if job.settings is None and (process.member or not job.generation):
        job.settings = (ready.settings, check_state(ready.state))


def refuse_other_settings(job: Job, now: float, process: Process) -> None:
    """Drops the node of a process that was started with other flags than the job."""
    if process.ready is None or job.settings is None:
        return
    settings, grid = job.settings
    own = process.ready.settings | {"grid": list(check_state(process.ready.state))}
    wanted = settings | {"grid": list(grid)}
    differing = sorted(n for n in own.keys() | wanted.keys() if own.get(n) != wanted.get(n))
    if differing:
        shown = ", ".join(f"{n} {own.get(n)!r} is not {wanted.get(n)!r}" for n in differing)
        why = f"node {process.node} differs from the job: {shown}; start it with equal flags"
        job.log(f"refused: {why}")
        lose(job, now, process.node, why, True, Exit(2, "RefusedError", why))
