"""What a checkpoint holds of a run: arrays under names that hold in every world; plain values."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch import nn

from megatron_resilient.checkpoint.manifest import ArrayInfo
from megatron_resilient.checkpoint.snapshot import dtype_name
from megatron_resilient.comm.transfer import Holding
from megatron_resilient.mcore import expert_rng, given_flags
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.optimizer_state import single_optimizers
from megatron_resilient.mcore.recovery.arrays import (
    Arrays,
    Buffers,
    merged,
    named_parameters,
    owned,
    random_state,
    stepped,
)
from megatron_resilient.mcore.recovery.old_state import scalars
from megatron_resilient.mcore.recovery.refill import show_to_model

# What must be equal in a model that loads a checkpoint; sizes that follow the world are not here.
_IDENTITY = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "padded_vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "optimizer",
)


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what tells this model from others that have other state."""
    return {name: getattr(args, name, None) for name in _IDENTITY}


@dataclass(frozen=True)
class Signature:
    """Tells whether what a rank holds is still the same.

    Attributes:
        moments: parameters that have moments, by optimizer.
        slots: of each layer: the object, of which a layer gets another one when experts move.
    """

    moments: tuple[int, ...]
    slots: tuple["_Same", ...]


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to what holds the very same object."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Contents:
    """All state of one rank in one generation, as views and as plain values.

    Args:
        model: the model chunks.
        optimizer: Megatron's; None where nothing is trained, and such contents are only filled.
        scheduler: Megatron's learning-rate scheduler; None likewise.
        layers: the replicated layers of the model.
    """

    def __init__(
        self,
        model: list[nn.Module],
        optimizer: Any,
        scheduler: Any,
        layers: list[ReplicatedMoELayer],
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.layers = (
            model,
            optimizer,
            scheduler,
            layers,
        )
        self._buffers = Buffers(model)

    def arrays(self) -> Arrays:
        """Returns the arrays; those of the optimizer and the model are views."""
        return merged(self.stepped(), self._buffers.arrays(), random_state(), random_of_experts())

    def stepped(self) -> Arrays:
        """Returns, as views, what only an optimizer's step changes."""
        if self.optimizer is None:
            return self._weights()
        return stepped(owned(self.model, self.optimizer))

    def moving(self) -> Arrays:
        """Returns the rest, as it is now: a forward or backward pass may change it."""
        return merged(self._buffers.arrays(copied=True), random_state(), random_of_experts())

    def show(self, arrays: Arrays) -> None:
        """Has the model compute with what its arrays were filled with. Collective.

        Args:
            arrays: those of `arrays`.
        """
        if self.optimizer is not None:
            show_to_model(self.model, self.optimizer)
            return
        with torch.no_grad():
            for key, parameter in self._trained().items():
                parameter.view(-1).copy_(arrays.store[key][0][1]["main"])

    def _weights(self) -> Arrays:
        """Returns fp32 values for parameters that no optimizer keeps; views where they are fp32."""
        arrays = Arrays()
        for key, parameter in self._trained().items():
            arrays.add(key, 0, {"main": parameter.detach().view(-1).float()})
        return arrays

    def _trained(self) -> dict[str, nn.Parameter]:
        named = named_parameters(self.model)
        return {key: parameter for key, parameter in named.items() if parameter.requires_grad}

    def infos(self, arrays: Arrays) -> dict[str, ArrayInfo]:
        """Returns what each array is that this rank holds all or part of."""
        shapes = {key: tuple(p.shape) for key, p in named_parameters(self.model).items()}
        found = {}
        for key, stretches in arrays.store.items():
            kinds = {kind: dtype_name(tensor) for kind, tensor in stretches[0][1].items()}
            found[key] = ArrayInfo(shapes.get(key) or (_stop(stretches),), kinds)
        return found

    def holdings(self) -> dict[int, Holding]:
        """Returns {layer: expert of each slot} of this rank's pipeline stage."""
        return {layer.layer_number: layer.holding for layer in self.layers}

    def signature(self) -> Signature:
        """Returns what is something else after experts have moved, or have got moments."""
        return Signature(
            tuple(len(single.optimizer.state) for single in single_optimizers(self.optimizer)),
            tuple(_Same(layer.slots) for layer in self.layers),
        )

    def values(self) -> dict[str, Any]:
        """Returns what is the same on every rank and changes after the optimizer's step only."""
        return {
            "scheduler": _plain(self.scheduler.state_dict()),
            "counts": scalars(owned(self.model, self.optimizer)),
            "flags": given_flags.given(),
        }


def random_of_experts() -> Arrays:
    """Returns the random stream of this rank's experts, as bytes."""
    arrays, stream = Arrays(), expert_rng.own_stream()
    if isinstance(stream, torch.Tensor):
        arrays.add(random_key(), 0, {"value": stream.cpu().clone().view(torch.uint8)})
    return arrays


def random_key() -> str:
    """Names that stream; there is one for each pipeline, expert tensor and expert parallel rank."""
    args = get_args()
    return (
        f"random_experts/{args.expert_model_parallel_size}/"
        f"{mpu.get_pipeline_model_parallel_rank()}.{mpu.get_expert_tensor_parallel_rank()}."
        f"{mpu.get_expert_model_parallel_rank()}"
    )


def _stop(stretches: list[tuple[int, Any]]) -> int:
    return max(start + next(iter(kinds.values())).numel() for start, kinds in stretches)


def _plain(value: Any) -> Any:
    """Returns a scheduler's state without what JSON cannot say."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
