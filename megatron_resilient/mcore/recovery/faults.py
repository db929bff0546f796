"""The points at which `--resilient-fault` may strike this process."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_resilient.elastic.faults import FaultInjector

_injector: FaultInjector | None = None
_step = 0


def install(injector: FaultInjector) -> None:
    """Arms this process, once."""
    global _injector
    if _injector is None:
        _injector = injector


def at_step(step: int) -> None:
    """Says which step is in progress."""
    global _step
    _step = step


def point(phase: str, step: int | None = None) -> None:
    """Says that this process is here; see `elastic.faults.PHASES`.

    Args:
        phase: of what it does.
        step: to which that belongs; default: the one in progress.
    """
    if _injector is not None:
        _injector.point(phase, _step if step is None else step)


def in_microbatches(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the user's forward step with points in the forward and the backward pass."""
    if _injector is None or not _injector.is_armed:
        return forward_step

    def struck(*args: Any, **kwargs: Any) -> Any:
        point("forward")
        output, loss_function = forward_step(*args, **kwargs)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(_in_backward)
        return output, loss_function

    return struck


def _in_backward(gradient: torch.Tensor) -> None:
    point("backward")
