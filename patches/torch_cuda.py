"""torch.cuda on a machine without CUDA: the names that Megatron calls answer for the CPU.

Work on a CPU is synchronous, so streams and events have nothing to order: they are inert objects.
`torch.cuda.is_available()` is left alone: whoever asks for a GPU gets an honest "no".
"""

from types import SimpleNamespace
from typing import Any

from megatron_resilient.patching.registry import Patch

TORCH = ">=2.11,<2.12"


def _answer(value: Any):
    """Returns a `make` whose replacement ignores its arguments and returns `value()`."""

    def make(original):
        def answer(*args, **kwargs):
            return value()

        answer.__name__ = getattr(original, "__name__", "answer")
        return answer

    return make


def _cpu_device():
    import torch

    return torch.device("cpu")


class InertEvent:
    """A `torch.cuda.Event` for work that is over when the call returns."""

    def __init__(self, *args, **kwargs):
        self._time_seconds = 0.0

    def record(self, stream=None):
        """Notes the time, for `elapsed_time`."""
        import time

        self._time_seconds = time.perf_counter()

    def elapsed_time(self, end: "InertEvent") -> float:
        """Returns the milliseconds from this event to `end`."""
        return (end._time_seconds - self._time_seconds) * 1e3

    def query(self) -> bool:
        """Returns True: nothing is ever pending."""
        return True

    def wait(self, stream=None):
        """Returns at once."""

    def synchronize(self):
        """Returns at once."""


class InertStream:
    """A `torch.cuda.Stream` for a device that has only one order of work."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args, **kwargs):
        pass

    @property
    def device(self):
        """The CPU."""
        return _cpu_device()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns (least, greatest) priority, as CUDA does."""
        return (0, 0)

    def wait_stream(self, stream):
        """Returns at once."""

    def wait_event(self, event):
        """Returns at once."""

    def record_event(self, event=None) -> InertEvent:
        """Records `event`, or a new one, and returns it."""
        event = event or InertEvent()
        event.record()
        return event

    def synchronize(self):
        """Returns at once."""

    def query(self) -> bool:
        """Returns True: nothing is ever pending."""
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


_THE_STREAM = InertStream()


def _device_properties():
    import os

    import torch

    return SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        multi_processor_count=torch.get_num_threads(),
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _stream_context():
    import contextlib

    return contextlib.nullcontext()


def _get_rng_state(original):
    def get_rng_state(device="cuda"):
        import torch

        return torch.default_generator.get_state()

    return get_rng_state


def _set_rng_state(original):
    def set_rng_state(new_state, device="cuda"):
        import torch

        torch.default_generator.set_state(new_state)

    return set_rng_state


def _manual_seed(original):
    def manual_seed(seed):
        import torch

        torch.default_generator.manual_seed(int(seed))

    return manual_seed


def _lazy_call(original):
    def lazy_call(callable, **kwargs):
        callable()

    return lazy_call


def _default_generators(original):
    import torch

    class Generators(tuple):
        """One generator, whatever the index: Megatron indexes with current_device()."""

        def __getitem__(self, index):
            return torch.default_generator

    return Generators((torch.default_generator,))


def _cuda(name: str, make, reason: str, bound_in=()) -> Patch:
    short = name.rpartition(":")[2]
    kind = "-class" if short[0].isupper() else ""
    return Patch(
        id=f"cpu.cuda-{short.strip('_').replace('_', '-').lower()}{kind}",
        group="cpu",
        target=name if ":" in name else f"torch.cuda:{name}",
        kind="replace",
        make=make,
        reason=reason,
        no_seam="Megatron names torch.cuda directly; there is no device argument.",
        upstream="torch",
        versions=TORCH,
        bound_in=bound_in,
        removable_when="Megatron asks torch.accelerator, or an argument, for its device.",
    )


_NOTHING_TO_ORDER = "A CPU has one order of work: there is nothing to wait for."
_NO_MEMORY = "A CPU process has no CUDA allocator to ask."

PATCHES = (
    _cuda("current_device", _answer(_cpu_device), "It raises; Megatron uses it as `device=`."),
    _cuda(
        "device_count",
        _answer(lambda: 1),
        "Megatron builds its groups and seeds its generators only where a device is counted.",
    ),
    _cuda("set_device", _answer(lambda: None), "It raises without a driver."),
    _cuda("get_device_properties", _answer(_device_properties), "It raises without a driver."),
    _cuda("get_device_capability", _answer(lambda: (0, 0)), "It raises without a driver."),
    _cuda("get_device_name", _answer(lambda: "cpu"), "It raises without a driver."),
    _cuda("Stream", lambda original: InertStream, _NOTHING_TO_ORDER),
    _cuda("Event", lambda original: InertEvent, _NOTHING_TO_ORDER),
    _cuda("stream", _answer(_stream_context), _NOTHING_TO_ORDER),
    _cuda("current_stream", _answer(lambda: _THE_STREAM), _NOTHING_TO_ORDER),
    _cuda("default_stream", _answer(lambda: _THE_STREAM), _NOTHING_TO_ORDER),
    _cuda("set_stream", _answer(lambda: None), _NOTHING_TO_ORDER),
    _cuda("synchronize", _answer(lambda: None), _NOTHING_TO_ORDER),
    _cuda("is_current_stream_capturing", _answer(lambda: False), "There are no CUDA graphs."),
    _cuda("_lazy_init", _answer(lambda: None), "It raises without a driver."),
    _cuda(
        "_lazy_call",
        _lazy_call,
        "Until CUDA is initialised, which it never is, it queues the call: seeds would be lost.",
    ),
    _cuda(
        "torch.cuda.random:get_rng_state",
        _get_rng_state,
        "The CPU's generator stands for the device's.",
        bound_in=("torch.cuda:get_rng_state",),
    ),
    _cuda(
        "torch.cuda.random:set_rng_state",
        _set_rng_state,
        "The CPU's generator stands for the device's.",
        bound_in=("torch.cuda:set_rng_state",),
    ),
    _cuda(
        "torch.cuda.random:manual_seed",
        _manual_seed,
        "The CPU's generator stands for the device's.",
        bound_in=("torch.cuda:manual_seed",),
    ),
    _cuda(
        "default_generators",
        _default_generators,
        "It is an empty tuple until CUDA is initialised.",
    ),
    _cuda(
        "torch.cuda.memory:empty_cache",
        _answer(lambda: None),
        _NO_MEMORY,
        bound_in=("torch.cuda:empty_cache",),
    ),
    _cuda(
        "torch.cuda.memory:memory_stats",
        _answer(dict),
        _NO_MEMORY,
        bound_in=("torch.cuda:memory_stats",),
    ),
    *(
        _cuda(
            f"torch.cuda.memory:{name}",
            _answer(lambda: 0),
            _NO_MEMORY,
            bound_in=(f"torch.cuda:{name}",),
        )
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
        )
    ),
)
