"""Dense optimizer shards a second time, on a rank of another node.

The distributed optimizer keeps each part of the dense state on one data-parallel rank only. Here
every rank also guards the part of one other rank, its ward: before a step commits the ward sends
the gradients of its part, and afterwards the guardian makes the same update. So the second copy is
never behind the first one, and a third of the bytes of the state travel, not all of it.
"""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import nn

from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.mcore.recovery.arrays import Owned, owned


class Mirror:
    """The part of the dense optimizer state that this rank guards for its ward.

    Attributes:
        owned: the guarded stretches.
        optimizers: inner optimizers that step them.
    """

    def __init__(self, own: list[Owned], shift: int) -> None:
        """Copies the ward's state. Collective over the dense data-parallel group.

        Args:
            own: what this rank's optimizer steps, of the dense state.
            shift: see `algorithms.guardians`.
        """
        self._own = own
        self._group = mpu.get_data_parallel_group(with_context_parallel=True)
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._ward, self._guardian = (rank - shift) % ranks, (rank + shift) % ranks
        numbers = list(OrderedDict((id(each.optimizer), each.optimizer) for each in own).values())
        place = {id(optimizer): i for i, optimizer in enumerate(numbers)}
        told = gather_json(
            [[e.key, e.start, e.main.numel(), place[id(e.optimizer)], e.group] for e in own],
            self._group,
        )
        self.optimizers = [_clone(optimizer) for optimizer in numbers]
        self._originals = numbers
        self.owned = []
        for key, start, size, number, group in told[self._ward]:
            main = torch.empty(size, dtype=torch.float32, device=torch.cuda.current_device())
            self.optimizers[number].param_groups[group]["params"].append(main)
            self.owned.append(Owned(key, start, main, self.optimizers[number], group))
        self._copy_state()

    def send_gradients(self) -> None:
        """Gives the guardian this rank's gradients, and takes the ward's. Collective.

        To be called with the gradients clipped and nothing updated.
        """
        outgoing = [e.main.grad.view(-1) for e in self._own]  # type: ignore[union-attr]
        received = self._pass_on(outgoing, [each.main.numel() for each in self.owned])
        for each, gradient in zip(self.owned, received, strict=True):
            each.main.grad = gradient
        for clone, original in zip(self.optimizers, self._originals, strict=True):
            for mine, theirs in zip(clone.param_groups, original.param_groups, strict=True):
                mine.update({k: v for k, v in theirs.items() if k not in ("params", "step")})

    def update(self) -> None:
        """Makes the ward's update. Local."""
        for optimizer in self.optimizers:
            optimizer.step()

    def _copy_state(self) -> None:
        """Copies values and moments, and how often they were updated."""
        kinds = sorted(self._own[0].kinds()) if self._own else ["main"]
        for kind in kinds:
            outgoing = [each.kinds()[kind] for each in self._own]
            received = self._pass_on(outgoing, [each.main.numel() for each in self.owned])
            for each, values in zip(self.owned, received, strict=True):
                if kind == "main":
                    each.main.copy_(values)
                else:
                    each.optimizer.state[each.main][kind] = values.clone()
        example = self._own[0] if self._own else None
        state = example.optimizer.state.get(example.main, {}) if example else {}
        for name, value in state.items():
            if name not in kinds:
                for each in self.owned:
                    own = value.clone() if isinstance(value, torch.Tensor) else value
                    each.optimizer.state[each.main][name] = own

    def _pass_on(self, outgoing: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Sends to the guardian, and returns what the ward sent."""
        ranks = dist.get_world_size(self._group)
        send_sizes, receive_sizes = [0] * ranks, [0] * ranks
        device = torch.cuda.current_device()
        flat = torch.cat([torch.empty(0, device=device), *(each.float() for each in outgoing)])
        send_sizes[self._guardian], receive_sizes[self._ward] = flat.numel(), sum(sizes)
        received = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=self._group)
        return list(received.split(sizes))


def dense_shards(model: list[nn.Module], optimizer: Any) -> list[Owned]:
    """Returns the dense stretches that this rank's optimizer steps."""
    return [each for each in owned(model, optimizer) if each.key.startswith("dense/")]


def _clone(original: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind and settings, with groups that are empty still."""
    clone: torch.optim.Optimizer = original.__class__.__new__(original.__class__)
    clone.__dict__.update(original.__dict__)
    clone.param_groups = [{**group, "params": []} for group in original.param_groups]
    clone.state = defaultdict(dict)
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    return clone
