"""A coordinator that a launcher runs beside its nodes, and starts again when it is killed."""

import os
import sys
import time
from collections.abc import Sequence

from megatron_resilient.elastic import child
from megatron_resilient.elastic.protocol import TOKEN_VARIABLE

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
_END_SECONDS = 2.0
_FOR_GOOD = (0, 2)  # training is done; it cannot run as it was told to


class CoordinatorChild:
    """A child process with the coordinator's command line."""

    def __init__(self, command: Sequence[str], token: bytes) -> None:
        """Starts it.

        Args:
            command: program and arguments; the same address at every start.
            token: the job's secret.
        """
        self._command = list(command)
        self._token = token
        self._pid: int | None = None
        self._again_at = 0.0
        self._pause = _FIRST_PAUSE_SECONDS
        self._ended = ""
        self._status: int | None = None
        self._start()

    def keep(self) -> int | None:
        """Looks after it; to be called often.

        Returns:
            None while it runs or is about to be started again: killed, or failed, or it ended a job
            whose nodes will end too. Else its exit status: training is done, or it cannot run.
        """
        if self._status is not None:
            return self._status
        if self._pid is not None:
            status = child.poll(self._pid)
            if status is None:
                return None
            self._pid = None
            if status in _FOR_GOOD:
                self._status = status
                return status
            self._ended = (
                f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
            )
            self._again_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if time.monotonic() >= self._again_at:
            print(f"the coordinator {self._ended}: starting it again", file=sys.stderr, flush=True)
            self._start()
        return None

    def end(self) -> None:
        """Lets it end by itself, as it does when the job is over, or kills it."""
        until = time.monotonic() + _END_SECONDS
        while self._pid is not None:
            if child.poll(self._pid) is not None:
                self._pid = None
            elif time.monotonic() > until:
                child.kill(self._pid)
                os.waitpid(self._pid, 0)
                self._pid = None
            else:
                time.sleep(0.02)

    def _start(self) -> None:
        environment = os.environ | {TOKEN_VARIABLE: self._token.decode()}
        self._pid = child.fork(lambda: child.execute(self._command, environment), stdout=2)
