"""Waiting for what other processes do."""

import time

PATIENCE_SECONDS = 20.0


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def until(condition, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
