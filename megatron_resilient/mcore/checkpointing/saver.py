"""Saves the state of a generation: planned by all, copied beside training, written by a worker.

A save goes through these stages, the same on every rank and in the order of saves:

1. `save`: who writes what is planned, and this rank's share begins to be copied into host memory.
2. `before_update`: the copy is waited for, because the optimizer changes what it reads.
3. The worker writes the copy into files. Between two steps `poll` asks all ranks whether they are
   done: one small all-reduce, and only while a save is on its way.
4. Rank 0 writes the manifest, and with it the save is there.

Where a rank fails all of them hear of it in `poll`, and training goes on to the next save.
"""

import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilient.algorithms.expert_selection import TwoLevels, select_two_levels
from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.algorithms.write_plan import Masters, Unit
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint import gc
from megatron_resilient.checkpoint.buffers import Buffer
from megatron_resilient.checkpoint.manifest import DataFile, Manifest, Stretch
from megatron_resilient.checkpoint.snapshot import Snapshot, contents
from megatron_resilient.checkpoint.writer import FileJob, WriteFailed
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.config import CheckpointConfig
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.contents import Contents, identity
from megatron_resilient.mcore.checkpointing.layout import Kinds, Layout
from megatron_resilient.mcore.checkpointing.storage import Storage
from megatron_resilient.mcore.recovery import faults
from megatron_resilient.mcore.recovery.arrays import Arrays

_POLL_SECONDS = 0.01
# On their way at once: one is written, one copied. The third buffer has the newest that is durable.
_MOST_PENDING = 2

Items = list[tuple[Stretch, torch.Tensor]]


@dataclass
class Save:
    """One save on its way.

    Attributes:
        step: after which it was taken.
        begun: clock when it began.
        selection: experts that it has, by MoE layer.
        plain: `Manifest.state`.
        exact: it has all experts.
        files: that this rank writes: (path, stretches).
        buffer: with the copy; None if that failed.
        job: number of the worker's job; None until it has one.
        written: what this rank's worker wrote; None until then.
        all_written: what all ranks wrote; None until they have.
        manifest: rank 0's writing of the manifest.
        failed: why this rank cannot go on with it.
        stall_seconds: how long training waited for it on this rank.
    """

    step: int
    begun: float
    selection: TwoLevels
    plain: dict[str, Any]
    exact: bool
    files: list[tuple[str, tuple[Stretch, ...]]] = field(default_factory=list)
    buffer: Buffer | None = None
    job: int | None = None
    written: list[DataFile] | None = None
    all_written: list[DataFile] | None = None
    manifest: "Future[None] | None" = None
    failed: str | None = None
    stall_seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """What came of a save.

    Attributes:
        step: after which it was taken.
        failed: why it is not there; None: it is.
        path: of its manifest.
        seconds: from its beginning until it was durable, and known to be.
        stall_seconds: how long this rank's training waited for it.
        bytes: written by all ranks.
    """

    step: int
    failed: str | None
    path: str
    seconds: float
    stall_seconds: float
    bytes: int


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
        self._retain_interval = retain_interval
        self._layout: Layout | None = None
        self._layout_of: object = None
        self._snapshot = Snapshot()
        self._copying: Save | None = None
        self._pending: list[Save] = []
        self._manifests = ThreadPoolExecutor(1, "checkpoint-manifest")

    def save(self, step: int, progress: dict[str, Any], loads: dict[int, list[int]]) -> list[Saved]:
        """Begins a save, between two steps. Collective.

        Args:
            step: steps done.
            progress: see `recovery.progress`.
            loads: {layer: tokens per expert since the save before}, of this rank's pipeline stage;
                empty where another rank of the stage says it.

        Returns:
            What came of earlier saves that had to be waited for.
        """
        begun = time.perf_counter()
        ended: list[Saved] = []
        while len(self._pending) >= _MOST_PENDING:
            ended += self._wait()
        told = gather_json([secrets.token_hex(6), sorted(loads.items())])
        nonce = told[0][0]
        layout = self._find_layout()
        storage = self._storage
        storage.count({int(n): tokens for _, each in told for n, tokens in each}, layout)
        selection = self._select(layout)
        persist, beside = layout.kinds(selection, self._masters)
        plain = {
            **self._contents.values(),
            "progress": progress,
            "placement": {str(n): holding for n, holding in layout.placement.items()},
            **storage.plain(step, selection),
        }
        exact = set(persist) == set(layout.arrays) and all(
            set(own) == set(layout.arrays[key].kinds) for key, own in persist.items()
        )
        save = Save(step, begun, selection, plain, exact)
        self._pending.append(save)
        storage.saves += 1
        try:
            self._begin_copy(save, layout, persist, beside, places.save_folder(step, nonce))
        except CheckpointError as error:
            save.failed = str(error)
        save.stall_seconds = time.perf_counter() - begun
        return ended

    def before_update(self) -> None:
        """Waits until the copy of a save is complete: the optimizer is about to step. Local."""
        save, self._copying = self._copying, None
        if save is None:
            return
        assert save.buffer is not None
        try:
            save.stall_seconds += self._snapshot.wait()
        except CheckpointError as error:
            save.failed = str(error)
        else:
            self._storage.buffers.filled(save.buffer)
        self._advance(self._pending[0])
        faults.point("copied", save.step)

    def poll(self) -> list[Saved]:
        """Looks how far saves have come, between two steps. Collective while one is on its way.

        Returns:
            Those that have come to an end.
        """
        if not self._pending:
            return []
        begun = time.perf_counter()
        save = self._pending[0]
        self._advance(save)
        device = torch.cuda.current_device()
        flags = torch.tensor(
            [int(self._is_done(save)), int(save.failed is not None)], device=device
        )
        dist.all_reduce(flags)
        done, failed = flags.tolist()
        ended = None
        if failed:
            ended = self._fail(save)
        elif done == dist.get_world_size():
            if save.all_written is None:
                self._write_manifest(save)
            else:
                ended = self._complete(save)
        save.stall_seconds += time.perf_counter() - begun
        return [] if ended is None else [ended]

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
        self.before_update()
        for save in self._pending:
            self._storage.give_up(save.step, save.buffer, save.job)
        self._pending.clear()
        self._manifests.shutdown(wait=True)

    def _wait(self) -> list[Saved]:
        self.before_update()
        ended = self.poll()
        if not ended:
            time.sleep(_POLL_SECONDS)
        return ended

    @property
    def _masters(self) -> Masters:
        return "all" if self._config.checkpoint_masters == "all" else "selected"

    def _find_layout(self) -> Layout:
        """Returns who holds what; asked anew when experts have moved. Collective."""
        now = repr(self._contents.holdings())
        moments = len(self._contents.values()["counts"])
        if self._layout is None or self._layout_of != (now, moments):
            self._layout, self._layout_of = Layout.gather(self._contents), (now, moments)
        return self._layout

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
            storage.k_snapshot(k, experts),
            k,
            storage.ledger.unsaved("snapshot"),
            storage.ledger.unsaved("persist", with_pending=True),
        )

    def _begin_copy(
        self, save: Save, layout: Layout, persist: Kinds, beside: Kinds, folder: str
    ) -> None:
        own, rank = self._contents.arrays(), dist.get_rank()
        items: Items = []
        for number, unit in enumerate(layout.plan(persist).units[rank]):
            for mark, kinds in _parts(unit, persist, apart=self._masters == "all"):
                part = _views(own, unit.pieces, kinds)
                path = _path(folder, unit, number, mark, rank)
                save.files.append((path, tuple(stretch for stretch, _ in part)))
                items += part
        for unit in layout.plan(beside).units[rank] if beside else ():
            items += _views(own, unit.pieces, beside)
        if save.files:
            places.create_save(self._storage.directory, save.step, folder.rpartition(".")[2])
        buffer = self._storage.begin(save.step, contents(items))
        save.buffer, self._copying = buffer, save
        self._snapshot.start(items, buffer)

    def _advance(self, save: Save) -> None:
        """Gives the oldest save to the worker, or hears what came of it. Local."""
        storage = self._storage
        if save.failed is not None or save is self._copying or save.written is not None:
            return
        if save.job is None:
            if storage.buffers.next_to_persist() is None:  # the worker has one that was given up
                storage.sweep()
                return
            assert save.buffer is not None
            save.job = storage.write(save.buffer, _file_jobs(save))
        result = storage.result(save.job)
        if isinstance(result, WriteFailed):
            save.failed = str(result)
        elif result is not None:
            stretches = dict(save.files)
            save.written = [
                DataFile(each.path, save.step, each.bytes, each.sha256, stretches[each.path])
                for each in result.files
            ]

    def _is_done(self, save: Save) -> bool:
        if save.all_written is None:
            return save.written is not None
        if save.manifest is None or not save.manifest.done():
            return save.manifest is None
        error = save.manifest.exception()
        if isinstance(error, CheckpointError):
            save.failed = str(error)
        elif error is not None:
            raise error
        return True

    def _write_manifest(self, save: Save) -> None:
        """Has rank 0 write the manifest. Collective."""
        faults.point("written", save.step)
        told = gather_json([_file_to_plain(file) for file in save.written or ()])
        save.all_written = [_file_from_plain(each) for own in told for each in own]
        if dist.get_rank() == 0:
            # What became of the saves before it is known only now.
            save.plain["tokens"]["persist"] = self._storage.ledger.persist_marks(save.step)
            save.manifest = self._manifests.submit(self._finish_on_storage, save, self._layout)

    def _finish_on_storage(self, save: Save, layout: Layout) -> None:
        storage = self._storage
        assert save.all_written is not None
        kept: Iterable[DataFile] = ()
        if not save.exact:
            assert storage.base is not None
            base = places.read_manifest(places.manifest_path(storage.directory, storage.base))
            new = {(s.key, s.kind) for file in save.all_written for s in file.stretches}
            kept = [
                file
                for file in base.files
                if file.expert is not None
                and not any((each.key, each.kind) in new for each in file.stretches)
            ]
        from megatron.training import get_args

        manifest = Manifest(
            step=save.step,
            run=storage.run,
            written=time.time(),
            exact=save.exact,
            model=identity(get_args()),
            state=save.plain,
            arrays=layout.arrays,
            files=(*save.all_written, *kept),
        )
        places.write_manifest(storage.directory, manifest)
        if self._config.checkpoint_keep:
            gc.collect(
                storage.directory,
                keep_last=self._config.checkpoint_keep,
                keep_every=self._retain_interval or None,
            )

    def _complete(self, save: Save) -> Saved:
        self._pending.remove(save)
        assert save.buffer is not None
        assert save.all_written is not None
        self._storage.durable(save.step, save.buffer, dict(save.files))
        size = sum(file.bytes for file in save.all_written)
        faults.point("saved", save.step)
        return self._ended(save, None, size)

    def _fail(self, save: Save) -> Saved:
        """Gives one up on all ranks. Collective."""
        told = gather_json(save.failed)
        why = next(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None)
        if save is self._copying:
            self.before_update()
        self._pending.remove(save)
        self._storage.give_up(save.step, save.buffer, save.job)
        return self._ended(save, why, 0)

    def _ended(self, save: Save, failed: str | None, size: int) -> Saved:
        path = str(places.manifest_path(self._storage.directory, save.step))
        seconds = time.perf_counter() - save.begun
        return Saved(save.step, failed, path, seconds, save.stall_seconds, size)


def _parts(unit: Unit, kinds: Kinds, apart: bool) -> list[tuple[str, Kinds]]:
    """Returns what of a unit is to be together in a file: (a mark for its name, kinds by key).

    Where later saves may replace the fp32 values of an expert without its moments they stand in
    files of their own.
    """
    own = {piece.key: kinds[piece.key] for piece in unit.pieces}
    if not (apart and unit.name.startswith("expert/")):
        return [("", own)]
    main = {key: ("main",) for key, each in own.items() if "main" in each}
    moments = {key: tuple(k for k in each if k != "main") for key, each in own.items()}
    parts = [("main", main), ("moments", {key: each for key, each in moments.items() if each})]
    return [(mark, part) for mark, part in parts if part]


def _file_jobs(save: Save) -> tuple[FileJob, ...]:
    """Returns what of the buffer goes into which file: its entries are in the files' order."""
    assert save.buffer is not None
    entries = iter(save.buffer.entries)
    return tuple(
        FileJob(path, tuple(next(entries) for _ in stretches)) for path, stretches in save.files
    )


def _views(own: Arrays, pieces: Iterable[Piece], kinds: Kinds) -> Items:
    """Returns pieces of what this rank holds, kind by kind, as views."""
    found: Items = []
    for piece in pieces:
        for start, tensors in own.store[piece.key]:
            low = max(start, piece.start)
            high = min(start + next(iter(tensors.values())).numel(), piece.stop)
            if low >= high:
                continue
            for kind in kinds.get(piece.key, ()):
                view = tensors[kind][low - start : high - start]
                found.append((Stretch(piece.key, kind, low, high), view))
    return found


def _path(folder: str, unit: Unit, number: int, mark: str, rank: int) -> str:
    if not unit.name.startswith("expert/"):
        return places.dense_file(folder, number, rank)
    layer, expert, part = map(int, unit.name.split("/")[1:])
    path = places.expert_file(folder, layer, expert, part, rank)
    return path.replace(".safetensors", f".{mark}.safetensors") if mark else path


def _file_to_plain(file: DataFile) -> list[Any]:
    return [file.path, file.step, file.bytes, file.sha256, file.stretches]


def _file_from_plain(plain: list[Any]) -> DataFile:
    path, step, size, digest, stretches = plain
    return DataFile(path, step, size, digest, tuple(Stretch(*each) for each in stretches))
