"""The training state of a generation that lives, and the one place where a step commits."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import nn

from megatron_resilient.algorithms.guardians import guardian_shift
from megatron_resilient.elastic.member import Member
from megatron_resilient.errors import PlanMismatchError
from megatron_resilient.mcore.optimizer_state import single_optimizers
from megatron_resilient.mcore.recovery import faults
from megatron_resilient.mcore.recovery.arrays import (
    Arrays,
    Buffers,
    Owned,
    coordinate,
    everything,
    expert_key,
    merged,
    owned,
    random_state,
)
from megatron_resilient.mcore.recovery.mirror import Mirror, dense_shards
from megatron_resilient.mcore.recovery.old_state import OldState
from megatron_resilient.mcore.recovery.outcome import Outcome, StepLosses
from megatron_resilient.mcore.recovery.progress import Progress
from megatron_resilient.mcore.recovery.rejoined import Rejoined
from megatron_resilient.mcore.token_dispatcher import SlotMap


class LiveState:
    """Model, optimizer and position of this rank in one generation.

    A step commits where gradients are reduced, clipped and ready, and nothing has been updated:
    all ranks agree in a tiny all-reduce, then each updates by itself. Whoever comes out of the
    agreement knows that every rank has the gradients of the step, so all can complete it.

    Args:
        member: whose orders the agreement carries.
        model: the model chunks.
        optimizer: Megatron's.
        scheduler: Megatron's learning-rate scheduler.

    Attributes:
        loads: {layer: tokens per expert} that the placement was made for.
        progress: the position after the last step that committed.
        asked: bits that the agreement of that step brought (`Member.wants_boundary`).
        outcome: what came of that step.
        replay: the same, if Megatron has yet to log, evaluate and save after that step.
        extra: what leaving ranks handed over.
        redundancy: (placement, how many nodes may be lost with it).
        staged: gives what a move that was cut short has brought; see `Rebalancer.staged`.
    """

    def __init__(
        self,
        member: Member,
        model: list[nn.Module],
        optimizer: Any,
        scheduler: Any,
    ):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loads: dict[int, list[int]] = {}
        self.progress = Progress.now(optimizer, scheduler)
        self.replay: Outcome | None = None
        self.asked = 0
        self.outcome: Outcome | None = None
        self.extra = Arrays()
        self.staged: Callable[[], list[tuple[int, int, str, dict[str, torch.Tensor]]]] = list
        self.redundancy: tuple[list[SlotMap], int] | None = None
        self._mirror: Mirror | None = None
        self._member = member
        self._coordinate = coordinate()
        self._buffers = Buffers(model)
        self._before: Arrays | None = None  # buffers and random streams as the step began
        self._ready: Progress | None = None
        self._skipped = False
        self._made: set[int] = set()  # inner optimizers that made the step
        self._agreed = False
        self._step_began = 0.0
        self._losses = StepLosses()
        self._update = optimizer.step_with_ready_grads
        self._step = optimizer.step
        optimizer.step_with_ready_grads = self._agree_and_update
        optimizer.step = self._step_or_skip
        for inner in self._inner_optimizers():
            inner.register_step_post_hook(self._note_step)

    def resume_from(self, rejoined: Rejoined) -> None:
        """Takes up the position of the generation before."""
        self.loads = dict(rejoined.loads or {})
        self.replay = self.outcome = rejoined.replay
        if rejoined.replay is not None:  # Megatron stands one step back
            self.progress = replace(self.progress, step=rejoined.step)

    def begin_step(self) -> None:
        """To be called before each step: what a step changes before it commits is set aside."""
        self._step_began = time.perf_counter()
        faults.at_step(self.progress.step + 1)
        self._before = merged(self._buffers.arrays(), random_state()).copied()
        self.progress = self.progress.with_evaluations()
        self._ready, self._agreed, self._skipped = None, False, False
        self._made.clear()
        self._losses.clear()

    def watch_losses(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns Megatron's schedule, with an ear for the losses that it returns."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            losses = forward_backward(*args, **kwargs)
            self._losses.note(losses)
            faults.point("gradients")
            return losses

        return watched

    def end_step(self) -> None:
        """To be called after each step."""
        self._before = None
        self._ready = None

    def _agree_and_update(self) -> bool:
        if self._mirror is not None:
            self._mirror.send_gradients()
        self._agree(skipped=False)
        faults.point("committed")
        success = self._update()
        if self._mirror is not None:
            self._mirror.update()
        faults.point("updated")
        return success

    def _step_or_skip(self) -> tuple:
        result = self._step()
        if not self._agreed:  # an overflow, or a norm over the limit: no update this time
            self._agree(skipped=True)
        return result

    def _agree(self, skipped: bool) -> None:
        after = self.progress.after_step(self.optimizer, skipped)
        self._ready, self._skipped = after, skipped
        faults.point("commit")
        wants = self._member.wants_boundary
        said = [after.step, wants & 1, wants >> 1, *self._losses.pairs()]
        votes = torch.tensor(said, dtype=torch.float64, device=torch.cuda.current_device())
        dist.all_reduce(votes)
        steps, change, end, *losses = votes.tolist()
        if steps != after.step * dist.get_world_size():
            raise PlanMismatchError(
                f"rank {dist.get_rank()} is at step {after.step}, the mean of all ranks is "
                f"{steps / dist.get_world_size():.1f}: this is a defect, please report it"
            )
        self.asked = bool(change) | bool(end) << 1
        self._agreed = True
        self.progress, self._ready = after, None
        self.outcome = Outcome(
            self._losses.means(losses), skipped, time.perf_counter() - self._step_began
        )

    def mirror_shards(self, nodes: Sequence[str]) -> bool:
        """Has dense optimizer shards kept twice from now on. Collective over all ranks.

        Args:
            nodes: node of every rank of the world.

        Returns:
            Whether every shard has a guardian on another node.
        """
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        shift = guardian_shift([nodes[rank] for rank in dist.get_process_group_ranks(group)])
        if shift is None:
            return False
        self._mirror = Mirror(dense_shards(self.model, self.optimizer), shift)
        for inner in self._mirror.optimizers:
            inner.register_step_post_hook(self._note_step)
        return True

    def arrays(self) -> Arrays:
        """Returns all state, between two steps."""
        return everything(self._owned(), self._buffers)

    @property
    def is_mirrored(self) -> bool:
        """Whether dense optimizer shards are kept twice."""
        return self._mirror is not None

    def _owned(self) -> list[Owned]:
        """Returns what this rank steps: its own, and what it guards."""
        guarded = self._mirror.owned if self._mirror else []
        return [*owned(self.model, self.optimizer), *guarded]

    def leave(self) -> OldState:
        """Returns what must outlive the generation. The model may be torn down afterwards."""
        for layer, expert, kind, state in self.staged():
            self.extra.add(expert_key(layer, expert, kind), 0, state)
        in_step = self._before is not None
        now = merged(self._buffers.arrays(), random_state()).copied()
        is_whole = self._agreed or not in_step
        others = now if is_whole or self._before is None else self._before
        return OldState(
            progress=self.progress,
            owned=self._owned(),
            others=others,
            ready=self._ready,
            pending=[o for o in self._inner_optimizers() if id(o) not in self._made],
            skipped=self._skipped,
            others_ready=now,
            begun=in_step and not self._agreed,
            outcome=self.outcome,
            loads=self.loads,
            coordinate=self._coordinate,
            extra=self.extra,
        )

    def finish_update(self) -> None:
        """Makes the updates of an agreed step that were interrupted. Local."""
        if self._agreed and not self._skipped and self._before is not None:
            for inner in self._inner_optimizers():
                if id(inner) not in self._made:
                    inner.step()

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        own = [
            single.optimizer
            for single in single_optimizers(self.optimizer)
            if not getattr(single, "is_stub_optimizer", False)
        ]
        return [*own, *(self._mirror.optimizers if self._mirror else ())]

    def _note_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        self._made.add(id(inner))


def forget_error(error: BaseException) -> None:
    """Drops what an exception holds: each of its frames would keep the old model alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
