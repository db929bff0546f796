"""What makes a save visible once its files are written, in a thread of each rank.

Each thread waits for its rank's worker and tells rank 0 what was written; that of rank 0 writes the
manifest when all have told. No rank's training waits, and no step has to end for it.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist
from megatron.training import get_args

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint import gc
from megatron_resilient.checkpoint.manifest import DataFile, Manifest
from megatron_resilient.checkpoint.records import take_records, write_record
from megatron_resilient.checkpoint.writer import WriteFailed
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.contents import identity
from megatron_resilient.mcore.checkpointing.recipe import Recipe
from megatron_resilient.mcore.checkpointing.saves import Save
from megatron_resilient.mcore.checkpointing.storage import Storage
from megatron_resilient.mcore.recovery import faults

_POLL_SECONDS = 0.01
_SIZE_BYTES, _DIGEST_BYTES = 8, 32  # of a file, as ranks tell rank 0 of it


class Committer:
    """Commits the saves of a generation one after the other.

    Args:
        storage: what outlives generations.
        keep_last: so many newest checkpoints are kept; 0: all.
        keep_every: and those of steps that are multiples of this; 0: no others.
    """

    def __init__(self, storage: Storage, keep_last: int, keep_every: int) -> None:
        self._storage, self._keep_last, self._keep_every = storage, keep_last, keep_every
        self._thread = ThreadPoolExecutor(1, "checkpoint-commit")

    def start(self, save: Save) -> "Future[None]":
        """Begins to commit a save whose job the worker has.

        Returns:
            Ends when this rank has told, on rank 0 when the save is visible, or when it was
            cancelled; with a CheckpointError if something could not be written.
        """
        return self._thread.submit(self._commit, save)

    def collect(self) -> None:
        """Begins to remove what is not to be kept, on rank 0. A failure is said, and no more."""
        if self._keep_last and dist.get_rank() == 0:
            self._thread.submit(self._collect)

    def close(self) -> None:
        """Waits for what has begun; saves that are not to be waited for were cancelled."""
        self._thread.shutdown(wait=True)

    def _commit(self, save: Save) -> None:
        assert save.job is not None
        while (result := self._storage.result(save.job)) is None:
            if save.cancelled.wait(_POLL_SECONDS):
                return
        if isinstance(result, WriteFailed):
            raise CheckpointError(str(result))
        save.bytes = sum(file.bytes for file in result.files)
        rank = dist.get_rank()
        folder = self._storage.directory / save.folder
        text = b"".join(
            each.bytes.to_bytes(_SIZE_BYTES, "little") + bytes.fromhex(each.sha256)
            for each in result.files
        )
        write_record(folder, rank, text)
        told = take_records(folder, dist.get_world_size(), save.cancelled) if rank == 0 else None
        faults.point("written", save.step)
        if told is not None:
            self._write_manifest(save, told)

    def _write_manifest(self, save: Save, told: list[bytes]) -> None:
        storage, recipe = self._storage, save.recipe
        assert recipe is not None
        files = _all_files(recipe, save, told)
        kept: Iterable[DataFile] = ()
        if not recipe.is_exact:
            assert storage.base is not None
            base = places.read_manifest(places.manifest_path(storage.directory, storage.base))
            new = {(s.key, s.kind) for file in files for s in file.stretches}
            kept = [
                file
                for file in base.files
                if file.expert is not None
                and not any((each.key, each.kind) in new for each in file.stretches)
            ]
        manifest = Manifest(
            step=save.step,
            run=storage.run,
            written=time.time(),
            exact=recipe.is_exact,
            model=identity(get_args()),
            state=save.plain,
            arrays=recipe.layout.arrays,
            files=(*files, *kept),
        )
        places.write_manifest(storage.directory, manifest)
        save.seconds = time.perf_counter() - save.begun

    def _collect(self) -> None:
        try:
            gc.collect(
                self._storage.directory,
                keep_last=self._config.checkpoint_keep,
                keep_every=self._retain_interval or None,
            )
        except (CheckpointError, OSError) as error:
            print(f"WARNING: older checkpoints are not removed: {error}", flush=True)


def _all_files(recipe: Recipe, save: Save, told: list[bytes]) -> list[DataFile]:
    """Returns what all ranks wrote, from the recipe and what they told."""
    found = []
    for rank, record in enumerate(told):
        files = recipe.files(rank, save.folder)
        if len(record) != len(files) * (_SIZE_BYTES + _DIGEST_BYTES):
            raise CheckpointError(
                f"rank {rank} wrote other files than rank 0 expects; this is a defect, please "
                "report it"
            )
        for number, (path, stretches) in enumerate(files):
            start = number * (_SIZE_BYTES + _DIGEST_BYTES)
            digest = start + _SIZE_BYTES
            size = int.from_bytes(record[start:digest], "little")
            sha256 = record[digest : digest + _DIGEST_BYTES].hex()
            found.append(DataFile(path, save.step, size, sha256, stretches))
    return found
