"""What a process has of its saves over all generations: folder, lock, buffers, worker, counts."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_resilient.algorithms.expert_selection import TwoLevels
from megatron_resilient.algorithms.lost_tokens import DynamicK, TokenLedger
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.buffers import Buffer, Buffers
from megatron_resilient.checkpoint.choose import Chosen
from megatron_resilient.checkpoint.lock import RunLock
from megatron_resilient.checkpoint.manifest import Expert, Stretch
from megatron_resilient.checkpoint.writer import (
    FileJob,
    Result,
    WriteJob,
    WriteProgress,
    Writer,
)
from megatron_resilient.config import CheckpointConfig
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.checkpointing.layout import Layout
from megatron_resilient.mcore.checkpointing.memory import InMemory

_WAIT_SECONDS = 0.02


class Storage:
    """The folder that a run saves into, and what this process has of its saves.

    Args:
        directory: the folder.
        run: id of the run; its processes share the folder's lock.
        config: flags.

    Attributes:
        lock: on the folder.
        buffers: host memory for copies.
        writer: the process that writes them.
        base: step of the newest save that is there and that partial saves build on; None: the next
            save has all experts.
        saves: saves that were begun.
        ledger: tokens routed and saved.
        memory: the newest durable save as it still is in memory, if it is.
    """

    def __init__(self, directory: Path, run: str, config: CheckpointConfig, first: bool) -> None:
        self.directory, self.run = directory, run
        self._config = config
        self.lock = (RunLock.begin if first else RunLock.join)(directory, run)
        bound = int(config.checkpoint_memory_gib * (1 << 30)) or (1 << 62)
        self.buffers = Buffers(bound)
        self.writer = Writer(
            self.buffers.descriptors, stall_seconds=config.checkpoint_stall_seconds
        )
        self.writer.start()
        self.base: int | None = None
        self.saves = 0
        self.ledger = TokenLedger(0, 0)
        self._k: DynamicK | None = None
        self._faults = 0  # restores from a checkpoint
        self.memory: InMemory | None = None
        self._jobs = 0
        self._results: dict[int, Result] = {}
        self._given_up: dict[int, Buffer] = {}  # by the job that still reads it

    @property
    def masters(self) -> str:
        """Whose fp32 values partial saves write."""
        return self._config.checkpoint_masters

    def count(self, tokens: Mapping[int, list[int]], layout: Layout) -> None:
        """Adds tokens that were routed since the last save.

        Args:
            tokens: {layer: tokens per expert}, of all MoE layers.
            layout: names the layers.
        """
        if not self.ledger.routed and layout.experts:
            self.ledger = TokenLedger(len(layout.layers), layout.experts)
        none = [0] * layout.experts
        self.ledger.add([tokens.get(layer, none) for layer in layout.layers])

    def k(self, experts: int) -> int:
        """Returns how many experts of a layer the next save writes."""
        asked = self._config.checkpoint_experts
        if not asked or asked >= experts:
            return experts
        if self._k is None:
            self._k = DynamicK(experts, asked, self._config.checkpoint_lost_tokens)
        return self._k.k

    def plain(self, step: int, selection: TwoLevels) -> dict[str, Any]:
        """Notes a save that begins; returns its part of `Manifest.state`."""
        self.ledger.saved(step, selection)
        return {
            "saves": self.saves + 1,
            "masters": self.masters,
            "faults": self._faults,
            "tokens": self.ledger.to_plain(),
            "dynamic_k": self._k.to_plain() if self._k else None,
        }

    def durable(self, step: int, buffer: Buffer, files: Mapping[str, tuple[Stretch, ...]]) -> None:
        """Notes that a save is there."""
        self.buffers.persisted(buffer)
        self.memory = InMemory(buffer, step, files)
        self.ledger.persisted(step)
        self.base = step

    def begin(self, step: int, contents: Sequence[tuple[Stretch, str]]) -> Buffer:
        """Lays out a copy in a free buffer.

        Raises:
            CheckpointError: there is no room.
        """
        self.sweep()
        while (buffer := self.buffers.begin(step, contents)) is None:
            if not self._given_up:
                raise CheckpointError(
                    f"no room in host memory for the save of step {step}: earlier ones are still "
                    "being written; allow more (--resilient-checkpoint-memory-gib) or save less "
                    "often"
                )
            # A worker that does not get on is given up in the end, and its buffer is free then.
            time.sleep(_WAIT_SECONDS)
            self.sweep()
        return buffer

    def write(self, buffer: Buffer, files: tuple[FileJob, ...]) -> int:
        """Has the worker write files from a buffer; returns the number of the job."""
        self._jobs += 1
        self.writer.write(WriteJob(self._jobs, self.directory, buffer, files))
        return self._jobs

    def result(self, job: int) -> Result | None:
        """Returns what came of a job, None while it is not done. Returns at once."""
        for news in self.writer.poll():
            if not isinstance(news, WriteProgress):
                self._results[news.job] = news
        return self._results.get(job)

    def give_up(self, step: int, buffer: Buffer | None, job: int | None) -> None:
        """Notes that a save will never be there.

        Args:
            step: of the save.
            buffer: that it has.
            job: in which the worker was to write it.
        """
        self.ledger.abandoned(step)
        if buffer is None:
            return
        if job is not None and self.result(job) is None:
            self._given_up[job] = buffer
        else:
            self.buffers.release(buffer)

    def sweep(self) -> None:
        """Frees the buffers of saves that were given up, once the worker is done with them."""
        for job in [job for job in self._given_up if self.result(job) is not None]:
            self.buffers.release(self._given_up.pop(job))

    def facts(self) -> dict[str, Any]:
        """Returns what a process that joins must know, as plain values."""
        return {
            "run": self.run,
            "base": self.base,
            "saves": self.saves,
            "faults": self._faults,
            "tokens": self.ledger.to_plain(),
            "dynamic_k": self._k.to_plain() if self._k else None,
        }

    def adopt(self, facts: Mapping[str, Any]) -> None:
        """Takes over what another process of the run knows."""
        self.base, self.saves = facts["base"], facts["saves"]
        self._faults = facts["faults"]
        self.ledger = TokenLedger.from_plain(facts["tokens"])
        self._take_up_k(facts["dynamic_k"])

    def resume(
        self, directory: Path, chosen: Chosen, planned: int, newer: Collection[Expert]
    ) -> tuple[int, float]:
        """Goes on from a checkpoint; its experts may be of older steps than the rest.

        Args:
            directory: in which that is.
            chosen: the checkpoint.
            planned: tokens, times top-k, that a layer will have routed at the end of training.
            newer: experts that are of its own step, whatever it says.

        Returns:
            (tokens whose updates were lost with this restore, as part of all that are planned).
        """
        plain = chosen.manifest.state
        self.saves = plain["saves"]
        self.ledger = TokenLedger.from_plain(plain["tokens"])
        layers = sorted({layer for layer, _ in chosen.manifest.experts()})
        marks = {
            (layers.index(layer), expert): self.ledger.routed[layers.index(layer)][expert]
            for layer, expert in newer
        }
        marks |= _marks_of_replaced(directory, chosen, layers)
        lost = self.ledger.lost(marks, planned=[planned] * len(self.ledger.routed))
        self.ledger.restored()
        self._take_up_k(plain["dynamic_k"])
        self._faults = plain["faults"] + 1
        return sum(map(sum, lost.tokens)), lost.share

    def _take_up_k(self, plain: Mapping[str, Any] | None) -> None:
        """Goes on with the number of experts that faults have raised; flags of now count."""
        self._k = None
        asked = self._config.checkpoint_experts
        if plain and asked:
            self._k = DynamicK.from_plain(plain)
            self._k.limit = self._config.checkpoint_lost_tokens
            self._k.k = max(self._k.k, asked) if self._k.limit else asked

    def adapt_k(self, share: float, step: int, interval: int, total_steps: int) -> int | None:
        """Has saves write more experts if faults as frequent as so far would lose too many tokens.

        Args:
            share: of the planned tokens, that a restore has lost.
            step: from which training goes on.
            interval: steps between two saves.
            total_steps: of the whole training.

        Returns:
            The new number of experts, None if it stays.
        """
        if self._k is None or not self._k.limit:
            return None
        before = self._k.k
        remaining = self._faults * max(0, total_steps - step) / max(1, step)
        after = self._k.on_fault(share, interval, total_steps, remaining)
        return after if after != before else None

    def close(self) -> None:
        """Ends the worker and lets the folder go."""
        self.writer.close()
        self.buffers.close()
        self.lock.release()


def _marks_of_replaced(
    directory: Path, chosen: Chosen, layers: list[int]
) -> dict[tuple[int, int], int]:
    """Returns how many tokens the experts had had that were put in the place of damaged ones."""
    marks = {}
    for each in chosen.replaced:
        for step in places.manifests(directory):
            if step >= chosen.manifest.step:  # what it says may be changed at this moment
                continue
            manifest = places.read_manifest(places.manifest_path(directory, step))
            if manifest.experts().get((each.layer, each.expert)) == each.to_step:
                place = layers.index(each.layer), each.expert
                marks[place] = manifest.state["tokens"]["persist"][place[0]][place[1]]
                break
    return marks
