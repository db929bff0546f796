"""The two systems of a replay, as real processes on this machine.

Both train the same model on the same batch. Ours has one node a rank that lives and dies alone.
The other is what a launcher does with stock Megatron: any loss of a node in use ends all ranks, and
they are started again at once, as torchrun would, from the newest checkpoint. The plugin's features
are off there, but it runs Megatron on the CPU and shares a batch that does not divide evenly, which
stock refuses. In both, ranks are forked from a process that has imported Megatron, since ten nodes
would import beside each other and not one after the other; `restart` pays for one import a start.
"""

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from benchmarks.replay_accounts import Mark, Members
from megatron_resilient.elastic.limits import Limits
from megatron_resilient.simulation.trace import Change
from tests.support.pretrain_pool import flags
from tools.elastic_nodes import ElasticNodes
from tools.soak_watch import Tail
from tools.training_job import TrainingJob, environment

NODES = 10
GROUP = 2  # nodes of an expert-parallel group of stock's
SLOTS = 4  # experts of a layer that a node has room for: eight in a group, all of them
BATCH = 20
JOIN_WINDOW_SECONDS = 1.0
MICROBATCH_SECONDS = 0.4  # of a node's accelerator; see replay_script.py
FORKED = Path(__file__).resolve().parents[1] / "tools" / "forked_ranks.py"
SCRIPT = Path(__file__).with_name("replay_script.py")
ENVIRONMENT = {"REPLAY_MICROBATCH_SECONDS": str(MICROBATCH_SECONDS)}
LAYERS = 2
MODEL: dict[str, object] = {
    "num_layers": LAYERS,
    "hidden_size": 64,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    # More than there will be, but no more: each rank indexes all samples whenever it starts.
    "train_iters": 2_000,
    "lr_decay_iters": 2_000,
    "resilient_expert_load_interval": 0,
}
LIMITS = Limits(
    heartbeat_interval=2, heartbeat_timeout=20, join_window=JOIN_WINDOW_SECONDS, fence_timeout=60
)


class System(Protocol):
    """A job that is driven through the events of a trace."""

    name: str

    def start(self, nodes: tuple[str, ...]) -> None:
        """Starts training on these nodes."""
        ...

    def take(self, change: Change) -> None:
        """Plays a change: kills, tells to leave, starts."""
        ...

    def look(self) -> list[dict[str, Any]]:
        """Does what is due, and returns what has been written since: events of the run.

        Raises:
            RuntimeError: the job ended by itself.
        """
        ...


class Ours:
    """An elastic job; saves by expert."""

    name = "ours"

    def __init__(self, folder: Path, interval: int) -> None:
        """Starts all but the nodes."""
        folder.mkdir(parents=True)
        own = flags(
            **MODEL,
            expert_model_parallel_size=NODES,
            resilient_slots_per_rank=SLOTS,
            save=folder / "checkpoints",
            save_interval=interval,
            resilient_checkpoint_format="experts",
        )
        self._events = Tail(folder / "run" / "events.jsonl")
        self._nodes = ElasticNodes(SCRIPT, own, folder, LIMITS, NODES, environment() | ENVIRONMENT)

    def start(self, nodes: tuple[str, ...]) -> None:
        """Starts training on these nodes."""
        for node in nodes:
            self._nodes.start(node)

    def take(self, change: Change) -> None:
        """Plays a change."""
        for node in change.lost:
            self._nodes.kill(node)
        for node in change.left:
            self._nodes.leave(node)
        self.start(change.joined)

    def look(self) -> list[dict[str, Any]]:
        """Returns what is new."""
        self._nodes.check()
        return list(self._events.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._nodes.close()


class Restart:
    """All ranks, started again from Megatron's newest synchronous checkpoint at every loss.

    Nodes that join are taken in right after the next save, so that this costs no step.
    """

    name = "restart"

    def __init__(self, folder: Path, interval: int) -> None:
        """Starts nothing yet."""
        folder.mkdir(parents=True)
        os.environ.update(ENVIRONMENT)  # a job's processes inherit it
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._checkpoints.mkdir()
        self._flags = flags(
            **MODEL,
            expert_model_parallel_size=GROUP,
            save=self._checkpoints,
            load=self._checkpoints,
            save_interval=interval,
        )
        self.members = Members(GROUP, JOIN_WINDOW_SECONDS)
        self._events = Tail(folder / "run" / "events.jsonl")
        self._job: TrainingJob | None = None
        self._starts = 0
        self._told: list[dict[str, Any]] = []

    def start(self, nodes: tuple[str, ...]) -> None:
        """Starts training on these nodes."""
        self.members.join(nodes, 0.0)
        self._launch()

    def take(self, change: Change) -> None:
        """Plays a change; a departure is a loss here, however early it was told."""
        stops = self.members.lose((*change.lost, *change.left))
        self.members.join(change.joined, time.time())
        if stops or self._job is None:
            self._launch()

    def look(self) -> list[dict[str, Any]]:
        """Takes in who waits, if a save was just made, and returns what is new."""
        if self._job is not None and self._job.exit_code is not None:
            raise RuntimeError(f"the job ended by itself: see {self._job.log}")
        new = list(self._events.read())
        saved = any(event["event"] == "checkpoint_saved" for event in new)
        told, self._told = [*self._told, *new], []
        if saved and self.members.may_grow(time.time()):
            self._launch()
        return told

    def _launch(self) -> None:
        """Ends the job, and starts it on the nodes that are there."""
        if self._job is not None:
            self._job.kill()
            # What it wrote until its death comes before what its death means.
            self._told += self._events.read()
            self._told.append({"event": "rolled_back", "time": time.time(), "step": self._durable})
        world = self.members.form()
        self._job = None
        if world:
            self._starts += 1
            self._job = TrainingJob(
                len(world),
                self._flags,
                self._folder / "run",
                self._folder / f"start{self._starts}.log",
                [sys.executable, str(FORKED), str(len(world))],
                SCRIPT,
            )

    @property
    def _durable(self) -> int:
        tracker = self._checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._job is not None:
            self._job.kill()


def mark_of(event: dict[str, Any]) -> Mark | None:
    """Returns where training stands after an event, None if it says nothing of that."""
    if event["event"] in ("step", "rolled_back"):
        return Mark(event["time"], event["step"])
    return None
