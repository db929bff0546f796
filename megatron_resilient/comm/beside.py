"""Something that communicates beside what the caller goes on to do: one at a time, in order."""

import threading
from collections.abc import Callable

import torch


class Beside:
    """Runs functions beside the caller: on a thread for gloo, on a stream of its own for CUDA.

    Args:
        device: where the tensors are that the functions use.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []
        self._started = False

    def start(self, function: Callable[[], None]) -> None:
        """Starts a function, once the one before is through.

        What it uses must live until `join`, and belong to the caller's stream or be made by it.
        """
        self.join()
        self._started = True
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                function()
            return
        # Not held by what runs: a thread that hangs in a collective must not keep `self`'s owner.
        self._thread = threading.Thread(
            target=_run, args=(function, self._failures), name="resilient-beside", daemon=True
        )
        self._thread.start()

    @property
    def is_waited_for(self) -> bool:
        """Whether a function was started that `join` has not been called for."""
        return self._started

    def join(self) -> None:
        """Waits until the last function is through; on CUDA the current stream waits.

        Raises:
            Exception: what the function raised.
        """
        self._started = False
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failures:
            try:
                raise self._failures.pop()
            finally:
                self._failures.clear()


def _run(function: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        function()
    except BaseException as failure:
        failures.append(failure)
