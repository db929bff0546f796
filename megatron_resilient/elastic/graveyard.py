"""Ends what may never end, off the main thread."""

import threading
from collections.abc import Callable

_WAIT_SECONDS = 1.0


def retire(end: Callable[[], object], wait_seconds: float = _WAIT_SECONDS) -> bool:
    """Runs `end`, and goes on without it if it does not come back.

    Destroying a gloo group joins its threads, and one of those may wait for a peer that is gone.
    Pass a closure that holds the last references: they are dropped on that thread too.

    Args:
        end: destroys something that nothing else uses any more.
        wait_seconds: how long the caller waits for it.

    Returns:
        Whether it came back. If not, its thread stays until the process ends.

    Raises:
        Exception: whatever `end` raised in time.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            end()
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="resilient-graveyard", daemon=True)
    thread.start()
    thread.join(wait_seconds)
    if failures:
        raise failures[0]
    return not thread.is_alive()
