"""What benchmarks/checkpoint.py does inside the ranks: watches saves, and makes those of DCP.

Everything that training waits for is entered behind a barrier, for all systems alike, so that
waiting for a slower rank does not count: the call that saves, the calls between steps that ask how
far it is, and what the plugin waits for before the optimizer steps.
"""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.training import get_args, training

from megatron_resilient.mcore.checkpointing.contents import Contents
from megatron_resilient.mcore.checkpointing.saver import Saver

TRACKER = "latest_checkpointed_iteration.txt"


def _now() -> tuple[float, float]:
    """Returns the clock, and the processor time of this thread."""
    return time.perf_counter(), time.thread_time()


class Watch:
    """Wraps the functions of one run, and takes their times.

    Args:
        with_dcp: saves are made by torch DCP's async_save instead of Megatron's function.
    """

    def __init__(self, with_dcp: bool) -> None:
        self.saves: list[dict[str, Any]] = []
        self._save, self._poll = training.save_checkpoint, training.maybe_finalize_async_save
        self._update = Saver.before_update
        self._dcp = _Dcp() if with_dcp else None
        training.save_checkpoint = self._on_save
        training.maybe_finalize_async_save = self._on_poll
        watch = self

        def before_update(saver: Saver) -> None:
            begun, waits = _now(), saver.is_copying
            watch._update(saver)
            if waits:  # else nothing is waited for, and what passes is the scheduler's
                watch._add("update", begun)

        Saver.before_update = before_update  # type: ignore[method-assign]

    def end(self) -> list[dict[str, Any]]:
        """Puts the functions back; returns the saves."""
        training.save_checkpoint, training.maybe_finalize_async_save = self._save, self._poll
        Saver.before_update = self._update  # type: ignore[method-assign]
        return self.saves

    def _add(self, name: str, begun: tuple[float, float]) -> None:
        if self.saves:
            save, now = self.saves[-1], _now()
            save[name] = save.get(name, 0.0) + now[0] - begun[0]
            save["processor"] = save.get("processor", 0.0) + now[1] - begun[1]

    def _on_save(self, iteration: int, *args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        self.saves.append({"step": iteration, "time": time.time(), "clock": time.perf_counter()})
        begun = _now()
        if self._dcp is not None:
            result = self._dcp.save(iteration, *args[:3])
        else:
            result = self._save(iteration, *args, **kwargs)
        self._add("save", begun)
        self._look()
        return result

    def _on_poll(self, *args: Any, **kwargs: Any) -> None:
        is_last = kwargs.get("blocking", args[0] if args else False)
        if not self.saves:
            self._poll(*args, **kwargs)
            return
        dist.barrier()
        begun = _now()
        self._poll(*args, **kwargs)
        if is_last and self._dcp is not None:
            self._dcp.wait()
        if not is_last:
            self._add("polls", begun)
        self._look()

    def _look(self) -> None:
        """Notes when Megatron's tracker named a save; it has only the newest."""
        tracker = Path(get_args().save, TRACKER)
        if tracker.is_file():
            named = tracker.read_text()
            for save in self.saves:
                if str(save["step"]) == named and "durable" not in save:
                    save["durable"] = tracker.stat().st_mtime


class _Dcp:
    """The same state, under the same names, saved by torch DCP in its default way: a thread."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._future: Any = None

    def save(self, step: int, model: list, optimizer: Any, scheduler: Any) -> None:
        self.wait()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        arrays = Contents(model, optimizer, scheduler, []).arrays()
        state = {
            f"{key}|{kind}|{start}": tensor
            for key, stretches in arrays.store.items()
            for start, kinds in stretches
            for kind, tensor in kinds.items()
        }
        self._future = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(Path(get_args().save, f"step_{step}")),
            process_group=self._group,
        )

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


_watch: Watch | None = None


def begin(with_dcp: bool) -> None:
    """Watches the next run of this process."""
    global _watch
    _watch = Watch(with_dcp)


def end() -> list[dict[str, Any]]:
    """Returns the saves of that run."""
    global _watch
    assert _watch is not None
    saves, _watch = _watch.end(), None
    return saves
