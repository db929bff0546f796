"""Waits for gloo that end when the generation does.

A gloo collective whose peer has died or stopped waits for its timeout, minutes, and nothing frees
the thread in it for certain: `abort()` does not, and cutting its sockets not always. So every
`Work.wait` becomes a row of short ones with a look at the fence in between. The first of them
returns as soon as the work is done: nothing is slower.

For gloo alone: a timed wait that expires makes NCCL block the CPU and abort the communicator, which
has an abort that works.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

_POLL = timedelta(milliseconds=100)
# An expired wait for these breaks gloo's connection to the peer, or it knows no timeout (UNKNOWN is
# its reduce-scatter). Whoever waits for them is freed by `sockets.cut`.
_UNTIMED = frozenset(
    int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE, OpType.UNKNOWN)
)
_EXPIRED = "Operation timed out!"

_original: Callable[..., bool] | None = None


def install(check: Callable[[], None], note_progress: Callable[[], None] | None = None) -> None:
    """Makes all waits of this process look at the fence. Once more replaces `check`.

    Args:
        check: raises when the wait has to end; called ten times a second while one waits.
        note_progress: called after each wait that went through.
    """
    global _original
    if _original is None:
        _original = Work.wait
    waiting = _polling(_original, check, note_progress or (lambda: None))
    Work.wait = waiting  # type: ignore[method-assign]


def uninstall() -> None:
    """Brings torch's own `Work.wait` back."""
    global _original
    if _original is not None:
        Work.wait = _original  # type: ignore[method-assign]
        _original = None


def _polling(
    original: Callable[..., bool], check: Callable[[], None], note_progress: Callable[[], None]
) -> Callable[..., bool]:
    def wait(self: Any, timeout: timedelta | None = None) -> bool:
        # A caller's own limit is that of a monitored wait: it is kept as it is.
        if timeout:
            return original(self, timeout)
        if self._get_op_type() in _UNTIMED:
            check()
            done = original(self)
            note_progress()
            return done
        while True:
            try:
                done = original(self, _POLL)
            except RuntimeError as error:
                if str(error) != _EXPIRED:
                    raise
            else:
                note_progress()
                return done
            check()

    wait.__doc__ = original.__doc__
    return wait
