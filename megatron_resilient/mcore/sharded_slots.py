"""Checkpoints of replicated experts in stock Megatron's form: each logical expert once.

Megatron numbers experts by rank and position; here they are numbered by what the slots hold. A
replica is a copy of the first one to the checkpoint: it is not written, and it is read.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from megatron_resilient.mcore.experts import slot_of_key

Sharded = ShardedTensor | ShardedObject

if TYPE_CHECKING:
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer


def sharded_slots(
    state: dict[str, Any],
    prefix: str,
    layer: "ReplicatedMoELayer",
    expert_axis: int | None,
) -> dict[str, Any]:
    """Renumbers the experts in a layer's sharded state dict from slots to logical experts.

    Args:
        state: what MoELayer.sharded_state_dict returned, with slots as experts.
        prefix: of the experts module's keys.
        layer: the layer.
        expert_axis: the axis of global shapes along which experts are stacked; None where each
            expert has a key of its own (Megatron's singleton shards).

    Raises:
        ValueError: a rank holds an expert twice; such a placement is never planned.
    """
    rank = dist.get_rank(layer.ep_group)
    own = layer.holding[rank]
    if len(set(own)) != len(own):
        raise ValueError(f"rank {rank} holds an expert twice ({own}): it cannot be saved")
    renumbered = {}
    for key, entry in state.items():
        slot = slot_of_key(key[len(prefix) :]) if key.startswith(prefix) else None
        if slot is None:
            renumbered[key] = entry
            continue
        expert = own[slot]
        holders = [r for r, slots in enumerate(layer.holding) if expert in slots]
        copy_number = layer.expert_dp_rank * len(holders) + holders.index(rank)
        number = _Number(rank * len(own) + slot, expert, layer.logical_experts, copy_number)
        renumbered[key] = number.apply(entry, expert_axis)
    return renumbered


@dataclasses.dataclass(frozen=True)
class _Number:
    """How one slot is called: `old` of all slots becomes `new` of `experts`, copy `copy_number`."""

    old: int
    new: int
    experts: int
    copy_number: int

    def apply(self, entry: Any, axis: int | None) -> Any:
        changes: dict[str, Any] = {
            "key": self._rename(entry.key) if axis is None else entry.key,
            "replica_id": (*entry.replica_id[:2], self.copy_number),
        }
        if isinstance(entry, ShardedTensorFactory):
            build = entry.build_fn

            def build_renumbered(*args: Any) -> Any:
                return _map_tensors(lambda tensor: self._place(tensor, axis), build(*args))

            return dataclasses.replace(entry, build_fn=build_renumbered, **changes)
        return self._place(dataclasses.replace(entry, **changes), axis)

    def _place(self, entry: Sharded, axis: int | None) -> Sharded:
        """Puts a tensor or an object where the expert's is along the axis of experts."""
        if axis is None:
            return entry
        changes: dict[str, Any] = {
            "global_shape": _replaced(entry.global_shape, axis, self.experts),
            "global_offset": _replaced(entry.global_offset, axis, self.new),
        }
        if isinstance(entry, ShardedTensor):
            changes["axis_fragmentations"] = _replaced(
                entry.axis_fragmentations, axis, self.experts
            )
        return dataclasses.replace(entry, **changes)

    def _rename(self, key: str) -> str:
        return key.replace(f".experts.{self.old}.", f".experts.{self.new}.")


def _replaced(values: Any, axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _map_tensors(function: Any, state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _map_tensors(function, value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_map_tensors(function, value) for value in state)
    return function(state)
