"""Saves the state of a generation: planned by all, copied beside training, written by a worker.

A save goes through these stages, the same on every rank and in the order of saves:

1. `save`: one all-reduce is begun, and what a forward pass changes is copied.
2. A thread hears what all ranks told each other, finds out what this rank writes, copies it into
   host memory, and hands it to the worker.
3. `before_update`: the thread is waited for, because the optimizer changes what it reads. If
   experts have moved, this is where all ranks tell each other who holds what, and copy.
4. The worker writes the copy into files. A second thread waits for it and tells rank 0 what was
   written; that of rank 0 writes the manifest when all have told, and with it the save is there. No
   rank's training waits, and no step has to end for it.
5. Between two steps `poll` asks all ranks whether they are done: one small all-reduce, beside the
   next step, and only while a save is on its way.

Where a rank fails all of them hear of it in `poll`, and training goes on to the next save.
"""

import contextlib
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args

from megatron_resilient.algorithms.expert_selection import TwoLevels, select_two_levels
from megatron_resilient.algorithms.write_plan import Masters
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.manifest import Stretch
from megatron_resilient.checkpoint.snapshot import Snapshot
from megatron_resilient.checkpoint.writer import FileJob
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.config import CheckpointConfig
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.commit import Committer
from megatron_resilient.mcore.checkpointing.contents import Contents, Signature
from megatron_resilient.mcore.checkpointing.layout import Layout
from megatron_resilient.mcore.checkpointing.recipe import Recipe
from megatron_resilient.mcore.checkpointing.saves import Save, Saved
from megatron_resilient.mcore.checkpointing.storage import Storage
from megatron_resilient.mcore.checkpointing.tuning import Measured, interval, snapshot_experts
from megatron_resilient.mcore.recovery import faults
from megatron_resilient.mcore.recovery.arrays import Arrays, merged

_POLL_SECONDS = 0.01
# On their way at once: one is written, one copied. The third buffer has the newest that is durable.
_MOST_PENDING = 2

# Recipes that are kept: more than there are turns of a selection in turn, for most models.
_RECIPES = 64


class Saver:
    """Saves one generation's state. All methods that say so are collective over all ranks.

    Args:
        storage: what outlives generations.
        contents_: all state of this rank.
        config: flags.
        retain_interval: steps; saves at multiples of it are kept for ever. 0: none.
    """

    def __init__(
        self,
        storage: Storage,
        contents_: Contents,
        config: CheckpointConfig,
        retain_interval: int,
    ) -> None:
        self._storage, self._contents, self._config = storage, contents_, config
        self._layout: Layout | None = None
        self._layout_of: Signature | None = None
        self._recipes: dict[tuple[Any, ...], Recipe] = {}
        self._snapshot = Snapshot()
        self._copying: tuple[Save, _Source, Future[_Agreed | None]] | None = None
        self._pending: list[Save] = []
        self._measured = Measured()
        self._told = [0] * len(self._measured.told())
        self._asked: tuple[dist.Work | None, torch.Tensor] | None = None
        self._first_interval = get_args().save_interval
        self._cost: tuple[float, float] | None = None  # of a save: until durable, and its stall
        self._begun = 0.0
        self._copies = ThreadPoolExecutor(1, "checkpoint-copy")
        self._commits = Committer(storage, config.checkpoint_keep, retain_interval)

    def save(
        self, step: int, progress: dict[str, Any], loads: Mapping[int, torch.Tensor]
    ) -> list[Saved]:
        """Begins a save, between two steps. Collective.

        Args:
            step: steps done.
            progress: see `recovery.progress`.
            loads: {layer: tokens per expert since the save before}, of this rank.

        Returns:
            What came of earlier saves that had to be waited for.
        """
        begun = time.perf_counter()
        self.before_update()
        if self._pending and self._pending[-1].step == step:
            return []  # asked for twice: the state is the same
        self._begun = begun
        ended: list[Saved] = []
        while len(self._pending) >= _MOST_PENDING:
            ended += self._wait()
        now = self._contents.signature()
        telling = self._tell(loads, now != self._layout_of)
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        source = _Source(now, self._contents.moving(), stream)
        save = Save(step, begun, {"progress": progress})
        self._pending.append(save)
        self._copying = save, source, self._copies.submit(self._begin, save, source, *telling)
        save.stall_seconds = time.perf_counter() - begun
        return ended

    @property
    def is_copying(self) -> bool:
        """Whether `before_update` has a copy to wait for."""
        return self._copying is not None

    def before_update(self) -> None:
        """Waits until the copy of a save is complete: the optimizer is about to step.

        Collective if experts have moved since the save before.
        """
        if self._copying is None:
            return
        (save, source, copied), self._copying = self._copying, None
        begun = time.perf_counter()
        self._measured.free_seconds = begun - self._begun
        try:
            agreed = copied.result()
            if agreed is not None:
                self._layout = Layout.gather(self._contents)
                self._layout_of = source.signature
                self._recipes.clear()
                self._plan_and_copy(save, source, agreed)
        except CheckpointError as error:
            save.failed = str(error)
        save.stall_seconds += time.perf_counter() - begun
        faults.point("copied", save.step)

    def poll(self) -> list[Saved]:
        """Looks how far saves have come, between two steps. Collective while one is on its way.

        Returns:
            Those that have come to an end.
        """
        self._measured.between_steps()
        ended = self._look()
        args = get_args()
        if args.curr_iteration + 2 >= args.train_iters:
            # The last step, but for the first of a run. When training has ended, Megatron asks the
            # interval that it was started with whether that step was saved.
            args.save_interval = self._first_interval
        elif self._cost is not None:
            self._choose_interval(*self._cost)
            self._cost = None
        return ended

    def _look(self) -> list[Saved]:
        # While a save is being copied its thread has the buffers, on some rank if not on this one.
        if not self._pending or self._copying is not None:
            return []
        begun = time.perf_counter()
        save = self._pending[0]
        ended = None if self._asked is None else self._answered(save, *self._asked)
        self._asked = self._ask(self._pending[0]) if self._pending else None
        save.stall_seconds += time.perf_counter() - begun
        return [] if ended is None else [ended]

    def _ask(self, save: Save) -> "tuple[dist.Work | None, torch.Tensor]":
        """Begins to ask all ranks how far they are with the oldest save. Collective.

        The answer is looked at a step later, when it has long been there: the ranks of a step are
        never quite together, and a sum that is waited for has each wait for the last.
        """
        if save.job is None and save.failed is None:
            self._hand_over(save)
        is_done = save.commit is not None and save.commit.done()
        if is_done and save.commit is not None:
            error = save.commit.exception()
            if isinstance(error, CheckpointError):
                save.failed = str(error)
            elif error is not None:
                raise error
        own = [int(is_done), int(save.failed is not None), save.bytes]
        times = [save.seconds, save.stall_seconds]
        own += [round(1e6 * each) for each in times] + self._measured.told()
        flags = torch.tensor(own, device=torch.cuda.current_device())
        return dist.all_reduce(flags, async_op=True), flags

    def _answered(
        self, save: Save, asking: "dist.Work | None", flags: torch.Tensor
    ) -> Saved | None:
        """Does what all ranks' answer asks for; returns what came of the save. Collective."""
        if asking is not None:
            asking.wait()
        done, failed, size, seconds, stall, *self._told = flags.tolist()
        if failed:
            return self._fail(save)
        if done < dist.get_world_size():
            return None
        save.bytes = size
        save.seconds = seconds / 1e6  # as rank 0 says, and nobody else
        self._cost = save.seconds, stall / 1e6 / dist.get_world_size()
        return self._complete(save)

    def finish(self) -> list[Saved]:
        """Waits for all saves. Collective."""
        ended: list[Saved] = []
        while self._pending:
            ended += self._wait()
        return ended

    def abandon(self) -> None:
        """Gives up what is on its way: the generation is over. Local.

        The state may be changed afterwards: nobody copies from it any more.
        """
        for save in self._pending:
            save.cancelled.set()
        # What a copy failed with is no matter any more; perhaps the device that it read from has.
        self._copying = None
        self._copies.shutdown(wait=True)
        self._commits.close()
        for save in self._pending:
            if not save.folder:  # it was not planned yet, and nobody knows of it
                continue
            if self._is_there(save):
                assert save.buffer is not None
                self._storage.durable(save.step, save.buffer, dict(save.files))
            else:
                self._storage.give_up(save.step, save.buffer, save.job)
        self._pending.clear()

    def _is_there(self, save: Save) -> bool:
        """Whether a save is visible: rank 0 may have got so far, and nobody have heard of it."""
        try:
            path = places.manifest_path(self._storage.directory, save.step)
            files = places.read_manifest(path).files
        except CheckpointError:
            return False
        return any(file.path.startswith(f"{save.folder}/") for file in files)

    def _wait(self) -> list[Saved]:
        self.before_update()
        ended = self._look()
        if not ended:
            time.sleep(_POLL_SECONDS)
        return ended

    @property
    def _masters(self) -> Masters:
        return "all" if self._config.checkpoint_masters == "all" else "selected"

    def _tell(
        self, loads: Mapping[int, torch.Tensor], has_changed: bool
    ) -> "tuple[dist.Work | None, torch.Tensor]":
        """Begins to tell all ranks what this one has routed, and whether its experts have moved."""
        layers, experts = _shape()
        device = torch.cuda.current_device()
        told = torch.zeros(2 + layers * experts, dtype=torch.int64, device=device)
        told[0] = int(has_changed)
        if dist.get_rank() == 0:
            told[1] = secrets.randbits(48)
        for layer, tokens in loads.items():
            told[2:].view(layers, experts)[layer - 1] = tokens
        return dist.all_reduce(told, async_op=True), told

    def _begin(
        self, save: Save, source: "_Source", telling: "dist.Work | None", told: torch.Tensor
    ) -> "_Agreed | None":
        """Copies, unless experts have moved: then it returns what all agreed on. In a thread."""
        # A stream of its own: what is queued on the model's is not to be waited for.
        side = torch.cuda.Stream() if source.stream is not None else None
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            if telling is not None:
                telling.wait()
            agreed = self._agreed(told)
        if agreed.has_changed:
            return agreed
        self._plan_and_copy(save, source, agreed)
        return None

    def _plan_and_copy(self, save: Save, source: "_Source", agreed: "_Agreed") -> None:
        layout, storage = self._layout, self._storage
        assert layout is not None
        storage.count(agreed.tokens, layout)
        selection = self._select(layout)
        save.plain |= storage.plain(save.step, selection)
        save.folder = places.save_folder(save.step, agreed.nonce)
        storage.saves += 1
        self._copy(save, layout, selection, source)

    def _agreed(self, told: torch.Tensor) -> "_Agreed":
        layers, experts = _shape()
        changed, nonce, *counts = told.tolist()
        tokens = {
            layer + 1: counts[layer * experts : (layer + 1) * experts] for layer in range(layers)
        }
        return _Agreed(f"{nonce:012x}", tokens, changed > 0)

    def _select(self, layout: Layout) -> TwoLevels:
        storage, layers, experts = self._storage, len(layout.layers), layout.experts
        k = storage.k(experts) if storage.base is not None else experts
        if not experts or k >= experts:
            every = [tuple(range(experts)) for _ in range(layers)]
            return TwoLevels(every, every)
        return select_two_levels(
            self._config.checkpoint_selection,
            storage.saves,
            layers,
            experts,
            self._k_snapshot(layout, k),
            k,
            storage.ledger.unsaved("snapshot"),
            storage.ledger.unsaved("persist", with_pending=True),
        )

    def _k_snapshot(self, layout: Layout, k: int) -> int:
        asked = self._config.checkpoint_snapshot_experts
        if asked:
            return min(layout.experts, max(k, asked))
        return snapshot_experts(self._told, layout, k)

    def _choose_interval(self, seconds: float, stall_seconds: float) -> None:
        """Has saves come as often as pays, if the rate of faults was given."""
        mtbf = self._config.checkpoint_mtbf_seconds
        ranks = dist.get_world_size()
        steps = interval(self._told, ranks, seconds, stall_seconds, mtbf) if mtbf else None
        args = get_args()
        if steps is not None and steps != args.save_interval:
            args.save_interval = steps
            if dist.get_rank() == 0:
                print(
                    f"a save every {steps} steps from now on: it takes {seconds:.2f} s, training "
                    f"waits {stall_seconds:.3f} s for it, a fault is expected every {mtbf:g} s",
                    flush=True,
                )

    def _copy(self, save: Save, layout: Layout, selection: TwoLevels, source: "_Source") -> None:
        """Copies this rank's share and hands it to the worker."""
        storage, rank = self._storage, dist.get_rank()
        recipe = self._find_recipe(layout, selection)
        files = recipe.files(rank, save.folder)
        stretches = [stretch for _, own in files for stretch in own] + recipe.in_memory(rank)
        if rank == 0:
            placement = {str(number): holding for number, holding in layout.placement.items()}
            save.plain |= {**self._contents.values(), "placement": placement}
        places.create_save(storage.directory, save.step, save.folder.rpartition(".")[2])
        own = merged(self._contents.stepped(), source.moving)
        items = [(stretch, _view(own, stretch)) for stretch in stretches]
        buffer = storage.begin(save.step, [(each, recipe.dtype(each)) for each in stretches])
        save.recipe, save.files, save.buffer = recipe, files, buffer
        stream = source.stream
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            begun = time.perf_counter()
            self._snapshot.start(items, buffer)
            self._snapshot.wait()
            self._measured.copy_seconds = time.perf_counter() - begun
            self._measured.copy_bytes = buffer.used_bytes
        storage.buffers.filled(buffer)
        if self._pending[0] is save:
            self._hand_over(save)

    def _find_recipe(self, layout: Layout, selection: TwoLevels) -> Recipe:
        key = tuple(map(tuple, selection))
        if key not in self._recipes:
            if len(self._recipes) >= _RECIPES:
                self._recipes.clear()
            self._recipes[key] = Recipe.make(layout, selection, self._masters)
        return self._recipes[key]

    def _hand_over(self, save: Save) -> None:
        """Gives the oldest save to the worker, unless that has one that was given up."""
        assert save.buffer is not None
        if self._storage.buffers.next_to_persist() is None:
            self._storage.sweep()
            return
        entries = iter(save.buffer.entries)  # in the files' order
        jobs = (
            FileJob(path, tuple(next(entries) for _ in stretches)) for path, stretches in save.files
        )
        # What became of the saves before it is known by now.
        save.plain["tokens"]["persist"] = self._storage.ledger.persist_marks(save.step)
        save.job = self._storage.write(save.buffer, tuple(jobs))
        save.commit = self._commits.start(save)

    def _complete(self, save: Save) -> Saved:
        self._pending.remove(save)
        assert save.buffer is not None
        self._storage.durable(save.step, save.buffer, dict(save.files))
        faults.point("saved", save.step)
        # Now that all ranks know of it: until then the next save may need the one before.
        self._commits.collect()
        return self._ended(save, None, save.bytes)

    def _fail(self, save: Save) -> Saved:
        """Gives one up on all ranks. Collective."""
        told = gather_json(save.failed)
        why = next(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None)
        self._pending.remove(save)
        save.cancelled.set()
        self._storage.give_up(save.step, save.buffer, save.job)
        return self._ended(save, why, 0)

    def _ended(self, save: Save, failed: str | None, size: int) -> Saved:
        path = str(places.manifest_path(self._storage.directory, save.step))
        seconds = time.perf_counter() - save.begun if failed else save.seconds
        return Saved(save.step, failed, path, seconds, save.stall_seconds, size)


@dataclass(frozen=True)
class _Source:
    """What a save copies from.

    Attributes:
        signature: of the contents.
        moving: copies of what a forward pass changes.
        stream: on which the model runs; None: not on a GPU.
    """

    signature: Signature
    moving: Arrays
    stream: "torch.cuda.Stream | None"


@dataclass(frozen=True)
class _Agreed:
    """What all ranks told each other at the beginning of a save.

    Attributes:
        nonce: of this attempt.
        tokens: {layer: tokens per expert since the save before}, of all ranks.
        has_changed: experts have moved on some rank.
    """

    nonce: str
    tokens: dict[int, list[int]]
    has_changed: bool


def _shape() -> tuple[int, int]:
    """Returns how many layers there are, and experts of one."""
    args = get_args()
    return args.num_layers + (args.mtp_num_layers or 0), args.num_experts or 0


def _view(own: Arrays, stretch: Stretch) -> torch.Tensor:
    """Returns a stretch of what this rank holds, as a view."""
    for start, kinds in own.store[stretch.key]:
        tensor = kinds[stretch.kind]
        if start <= stretch.start and stretch.stop <= start + tensor.numel():
            return tensor[stretch.start - start : stretch.stop - start]
    raise AssertionError(f"{stretch} is not here, as it was when the layout was made")
