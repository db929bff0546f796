"""Runs a schedule: on threads where collectives block (gloo), on CUDA streams where they do not.

Both take functions by operation, `function(chunk, *results of what it needs)`, and hand each result
to those that need it. What nobody needs is in the outcome; the rest is dropped as soon as the last
that needs it has it, so that a chunk's memory is free for a later one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_resilient.comm.pipeline import COMPUTE, Key, Schedule, Span, name

# How long streams may take to come out of what they are in, once one has failed. A collective whose
# peers have gone does not come out before its group's own timeout.
PATIENCE_SECONDS = 5.0

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        results: what the operations returned that no other one needs.
        spans: gives when each operation ran; on CUDA it waits for the device.
    """

    results: dict[Key, Any]
    spans: Callable[[], list[Span]]


class Streams(Protocol):
    """Something that can run a schedule."""

    def run(self, schedule: Schedule, functions: Functions) -> Outcome:
        """Runs all operations, each once; collective if they are.

        Args:
            schedule: what runs where and after what.
            functions: by an operation's name; called as `function(chunk, *results)`.

        Raises:
            Exception: the first that an operation raised, with a note of which one that was. Later
                operations of all streams are left out.
        """
        ...


def streams_for(device: torch.device) -> Streams:
    """Returns what runs schedules on a device."""
    return CudaStreams(device) if device.type == "cuda" else ThreadStreams()


class ThreadStreams:
    """A thread for each stream; the calling thread is the one of `own`.

    A thread that waits in gloo, sleeps or multiplies matrices lets the others run. Threads live for
    one run and have the caller's grad mode.

    Args:
        own: the stream of the calling thread: what belongs to it (autograd's state, random numbers,
            autocast) is at hand there.
    """

    def __init__(self, own: str = COMPUTE) -> None:
        self._own = own

    def run(self, schedule: Schedule, functions: Functions) -> Outcome:
        """Runs all operations; see `Streams.run`."""
        run = _ThreadedRun(schedule, functions)
        grad = torch.is_grad_enabled()
        threads = [
            threading.Thread(target=run.follow, args=(lane, grad), name=lane, daemon=True)
            for lane in schedule.lanes
            if lane != self._own
        ]
        for thread in threads:
            thread.start()
        if self._own in schedule.lanes:
            run.follow(self._own, grad)
        for thread in threads:
            run.join(thread)
        if run.failure is not None:
            failure, run.failure = run.failure, None
            try:
                raise failure
            finally:
                # A frame that names its own exception is a circle: it would keep the tensors.
                del failure, run
        return Outcome(run.results, lambda: run.spans)


class _ThreadedRun:
    """One run on threads. A result and its event are set by one thread and only read by others."""

    def __init__(self, schedule: Schedule, functions: Functions) -> None:
        self._schedule = schedule
        self._functions = functions
        self._done = {key: threading.Event() for key in schedule.uses}
        self._uses = dict(schedule.uses)
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self.results: dict[Key, Any] = {}
        self.spans: list[Span] = []
        self.failure: BaseException | None = None

    def follow(self, lane: str, grad: bool) -> None:
        key = None
        try:
            with torch.set_grad_enabled(grad):
                for key in self._schedule.lanes[lane]:
                    needs = self._schedule.needs.get(key, ())
                    for need in needs:
                        self._done[need].wait()
                    if self.failure is not None:
                        return
                    self._do(lane, key, [self._take(need) for need in needs])
        except BaseException as error:
            if key is not None:
                error.add_note(f"in {name(key)} on stream {lane}")
            self._fail(error)

    def join(self, thread: threading.Thread) -> None:
        try:
            while self.failure is None and thread.is_alive():
                thread.join(0.2)
        except BaseException as error:  # a signal's handler
            self._fail(error)
        thread.join(PATIENCE_SECONDS)
        if thread.is_alive() and self.failure is not None:
            self.failure.add_note(f"stream {thread.name} is still in an operation")

    def _do(self, lane: str, key: Key, inputs: list[Any]) -> None:
        start = time.perf_counter() - self._start
        result = self._functions[key[0]](key[1], *inputs)
        span = Span(lane, key, start, time.perf_counter() - self._start)
        with self._lock:
            self.results[key] = result
            self.spans.append(span)
        self._done[key].set()

    def _take(self, need: Key) -> Any:
        with self._lock:
            self._uses[need] -= 1
            return self.results[need] if self._uses[need] else self.results.pop(need)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = error
        for event in self._done.values():
            event.set()


class CudaStreams:
    """CUDA streams and events; one thread issues everything, in the schedule's order.

    No function may wait for the device (`.item()`, `.tolist()`): all streams would wait with it.
    Tensors that functions take from outside must live until `run` returns; from then on the
    caller's stream comes after all of it. With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron wants
    for tensor parallelism, kernels start in the order of issue.

    Args:
        device: where.
        timed: whether spans are recorded; costs two events an operation. May be set between runs.
    """

    def __init__(self, device: torch.device, timed: bool = True) -> None:
        self._device = device
        self.timed = timed
        self._streams: dict[str, torch.cuda.Stream] = {}

    def run(self, schedule: Schedule, functions: Functions) -> Outcome:
        """Issues all operations; see `Streams.run`. The caller's stream waits for them."""
        caller = torch.cuda.current_stream(self._device)
        for lane in schedule.lanes:
            if lane not in self._streams:
                # Communication first: its kernels are few, and others wait for what they bring.
                priority = 0 if lane == COMPUTE else -1
                self._streams[lane] = torch.cuda.Stream(self._device, priority=priority)
            self._streams[lane].wait_stream(caller)
        begin = self._event(caller)
        uses, results = dict(schedule.uses), {}
        lane_of: dict[Key, str] = {}
        ends: dict[Key, torch.cuda.Event] = {}
        starts: dict[Key, torch.cuda.Event] = {}
        try:
            for lane, key in schedule.order:
                stream = self._streams[lane]
                inputs = []
                for need in schedule.needs.get(key, ()):
                    result = results[need]
                    if lane_of[need] != lane:
                        stream.wait_event(ends[need])
                        # Its memory belongs to the other stream, which may take it back.
                        _used_on(result, stream)
                    inputs.append(result)
                    uses[need] -= 1
                    if not uses[need]:
                        del results[need]
                    del result
                with torch.cuda.stream(stream):
                    if self.timed:
                        starts[key] = self._event(stream)
                    results[key] = functions[key[0]](key[1], *inputs)
                    ends[key] = self._event(stream)
                del inputs
                lane_of[key] = lane
        except BaseException as error:
            error.add_note(f"in {name(key)} on stream {lane}")
            raise
        finally:
            for lane in schedule.lanes:
                caller.wait_stream(self._streams[lane])
        for result in results.values():
            _used_on(result, caller)

        def spans() -> list[Span]:
            for end in ends.values():
                end.synchronize()
            return [
                Span(
                    lane,
                    key,
                    begin.elapsed_time(starts[key]) / 1000,
                    begin.elapsed_time(ends[key]) / 1000,
                )
                for lane, key in schedule.order
                if key in starts
            ]

        return Outcome(results, spans)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.timed)
        event.record(stream)
        return event


def _used_on(result: Any, stream: torch.cuda.Stream) -> None:
    for tensor in _tensors(result):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from _tensors(value)
