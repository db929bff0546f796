"""Making gloo groups that a fence can interrupt.

While a group is made, gloo waits for peers to connect. A peer that has died meanwhile never does,
and the wait has no socket that could be cut; a shorter time limit would also be that of sends and
receives afterwards. So the group is made on a thread of its own, and left to it when the generation
ends: the thread ends with gloo's time limit.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroupGloo

_POLL_SECONDS = 0.1

_original: Callable[..., None] | None = None


def install(check: Callable[[], None]) -> None:
    """Makes all constructions of gloo groups in this process look at the fence.

    Args:
        check: raises when the wait has to end; called ten times a second while a group is made.
    """
    global _original
    if _original is None:
        _original = ProcessGroupGloo.__init__
    ProcessGroupGloo.__init__ = _interruptible(_original, check)


def uninstall() -> None:
    """Brings torch's own constructor back."""
    global _original
    if _original is not None:
        ProcessGroupGloo.__init__ = _original
        _original = None


def _interruptible(original: Callable[..., None], check: Callable[[], None]) -> Callable[..., None]:
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                original(self, *args, **kwargs)
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=run, name="resilient-gloo", daemon=True)
        thread.start()
        while True:
            thread.join(_POLL_SECONDS)
            if not thread.is_alive():
                break
            check()
        if failures:
            raise failures[0]

    return construct
