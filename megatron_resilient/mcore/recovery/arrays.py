"""A rank's training state as named flat arrays, under names that are the same in every world.

Tensor- and pipeline-parallel sizes never change, so dense state is named by its (pipeline, tensor)
coordinate; an expert is named by layer and logical number, whatever slot it is in.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_resilient.algorithms.refill_plan import Piece
from megatron_resilient.comm.pieces import Kinds
from megatron_resilient.mcore.expert_load import layer_number
from megatron_resilient.mcore.experts import slot_parameters
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.optimizer_state import single_optimizers


class Arrays:
    """What one rank has: for every key, stretches of the array with all its kinds."""

    def __init__(self) -> None:
        self.store: dict[str, list[tuple[int, Kinds]]] = {}

    def add(self, key: str, start: int, kinds: Kinds) -> None:
        """Adds a stretch that begins at element `start`; tensors are flat and of one length."""
        if next(iter(kinds.values())).numel():
            self.store.setdefault(key, []).append((start, kinds))

    def pieces(self) -> list[Piece]:
        """Returns what is here, without the tensors; in the order in which it was added."""
        return [
            Piece(key, start, start + next(iter(kinds.values())).numel())
            for key, stretches in self.store.items()
            for start, kinds in stretches
        ]

    def copied(self) -> "Arrays":
        """Returns the same in memory of its own."""
        return self._mapped(torch.clone)

    def on_host(self) -> "Arrays":
        """Returns the same in the host's memory, which on the CPU is where it is."""
        return self._mapped(lambda tensor: tensor.detach().cpu())

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Arrays":
        arrays = Arrays()
        for key, stretches in self.store.items():
            for start, kinds in stretches:
                arrays.add(key, start, {name: function(each) for name, each in kinds.items()})
        return arrays


def merged(*parts: Arrays) -> Arrays:
    """Returns all of several together."""
    arrays = Arrays()
    for part in parts:
        for key, stretches in part.store.items():
            arrays.store.setdefault(key, []).extend(stretches)
    return arrays


@dataclass(frozen=True)
class Owned:
    """A stretch of a parameter for which this rank's optimizer has the fp32 copy and moments.

    Attributes:
        key: of the array.
        start: first element of the parameter that is here.
        main: what the inner optimizer steps: flat or not, always contiguous.
        optimizer: the inner optimizer, torch's or one like it.
        group: number of its parameter group.
    """

    key: str
    start: int
    main: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: int

    def kinds(self) -> Kinds:
        """Returns the fp32 values and the moments that exist."""
        kinds = {"main": self.main.data.view(-1)}
        for name, value in self.optimizer.state.get(self.main, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == self.main.shape and value.dim():
                kinds[name] = value.view(-1)
        return kinds


def coordinate() -> tuple[int, int]:
    """Returns this rank's (pipeline, tensor) coordinate."""
    return mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()


def expert_key(layer: int, expert: int, kind: str) -> str:
    """Names a parameter of an expert."""
    return f"expert/{layer}/{expert}/{mpu.get_expert_tensor_parallel_rank()}/{kind}"


def expert_of(key: str) -> tuple[int, int] | None:
    """Returns (layer, logical expert) of an expert's array, None for another one."""
    parts = key.split("/")
    return (int(parts[1]), int(parts[2])) if parts[0] == "expert" else None


def named_parameters(model: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns {key: parameter}. Of an expert that is here twice, the first."""
    stage, tensor = coordinate()
    named: dict[str, nn.Parameter] = {}
    in_slots: set[nn.Parameter] = set()
    for layer in (m for chunk in model for m in chunk.modules() if isinstance(m, MoELayer)):
        experts = local_experts(layer)
        for kind, parameters in slot_parameters(layer.experts, len(experts)).items():
            for expert, parameter in zip(experts, parameters, strict=True):
                named.setdefault(expert_key(layer_number(layer.router), expert, kind), parameter)
                in_slots.add(parameter)
    for number, chunk in enumerate(unwrap_model(model)):
        for name, parameter in chunk.named_parameters():
            if parameter not in in_slots:
                named[f"dense/{stage}.{tensor}/{number}/{name}"] = parameter
    return named


def local_experts(layer: MoELayer) -> list[int]:
    """Returns the logical experts of a layer's local slots, whether it has replicas or not."""
    if isinstance(layer, ReplicatedMoELayer):
        return layer.holding[torch.distributed.get_rank(layer.ep_group)]
    return list(layer.local_expert_indices)


def owned(model: list[nn.Module], optimizer: Any) -> list[Owned]:
    """Returns all that this rank's optimizer steps.

    Args:
        model: the model chunks.
        optimizer: Megatron's ChainedOptimizer or one of those in it.
    """
    keys = {parameter: key for key, parameter in named_parameters(model).items()}
    found = []
    for single in single_optimizers(optimizer):
        if isinstance(single, DistributedOptimizer):
            for parameter, (group, place) in single.model_param_group_index_map.items():
                if parameter not in keys:
                    continue
                main = single.optimizer.param_groups[group]["params"][place]
                start = single._get_model_param_range_map(parameter)["param"].start
                found.append(Owned(keys[parameter], start, main, single.optimizer, group))
            continue
        of_main = {
            id(
                parameter
                if getattr(parameter, "main_param", None) is None
                else parameter.main_param
            ): key
            for parameter, key in keys.items()
        }
        for group, options in enumerate(single.optimizer.param_groups):
            for main in options["params"]:
                if id(main) in of_main:
                    found.append(Owned(of_main[id(main)], 0, main, single.optimizer, group))
    return found


def stepped(own: list[Owned]) -> Arrays:
    """Returns the fp32 values and moments of what an optimizer steps."""
    arrays = Arrays()
    for each in own:
        arrays.add(each.key, each.start, each.kinds())
    return arrays


class Buffers:
    """What is neither stepped nor made anew: persistent buffers and frozen parameters.

    Args:
        model: the model chunks, which are walked once.
    """

    def __init__(self, model: list[nn.Module]) -> None:
        stage, tensor = coordinate()
        self._buffers = [
            (f"buffer/{stage}.{tensor}/{number}/{name}.{own}", module, own)
            for number, chunk in enumerate(unwrap_model(model))
            for name, module in chunk.named_modules()
            for own, buffer in module._buffers.items()
            if buffer is not None and own not in module._non_persistent_buffers_set
        ]
        self._frozen = [
            (key, parameter)
            for key, parameter in named_parameters(model).items()
            if not parameter.requires_grad
        ]

    def arrays(self, copied: bool = False) -> Arrays:
        """Returns them as views.

        Args:
            copied: buffers, which change within a step, in memory of their own.
        """
        arrays = Arrays()
        for key, module, own in self._buffers:  # modules put other tensors there, too
            value = module._buffers[own].data.view(-1)
            arrays.add(key, 0, {"value": value.clone() if copied else value})
        for key, parameter in self._frozen:
            arrays.add(key, 0, {"value": parameter.data.view(-1)})
        return arrays


def everything(own: list[Owned], buffers: Buffers) -> Arrays:
    """Returns all state of a rank, as views where it is memory of the model's.

    Args:
        own: what its optimizers step.
        buffers: of its model.
    """
    return merged(stepped(own), buffers.arrays(), random_state())


def random_state() -> Arrays:
    """Returns the random streams of this rank, but that of its experts, as bytes.

    Megatron gives all data-parallel ranks of a coordinate the same streams.
    """
    stage, tensor = coordinate()
    arrays = Arrays()
    for name, state in _random_streams():
        arrays.add(f"random/{stage}.{tensor}/{name}", 0, {"value": state})
    return arrays


def set_random_state(arrays: Arrays) -> None:
    """Continues the streams of `random_state`."""
    states = {
        key.split("/", 2)[2]: stretches[0][1]["value"]
        for key, stretches in arrays.store.items()
        if key.startswith("random/")
    }
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
    words = states["numpy"].cpu().numpy().view(np.uint32)
    np.random.set_state(("MT19937", words[:624], int(words[624]), 0, 0.0))
    numbers = states["python"].cpu().numpy().view(np.int64)
    random.setstate((3, tuple(int(n) for n in numbers), None))
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    for name in current:
        if f"tracker.{name}" in states:
            current[name] = states[f"tracker.{name}"].cpu().view(current[name].dtype)
    tracker.set_states(current)


def _random_streams() -> Iterator[tuple[str, torch.Tensor]]:
    yield "torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "cuda", torch.cuda.get_rng_state()
    # The cached half of a pair of normal numbers is left out, here and below.
    _, words, place, _, _ = np.random.get_state()
    packed = np.append(words, np.uint32(place)).astype(np.uint32)
    yield "numpy", torch.from_numpy(packed.view(np.uint8).copy())
    numbers = np.asarray(random.getstate()[1], dtype=np.int64)
    yield "python", torch.from_numpy(numbers.view(np.uint8).copy())
    for name, state in sorted(get_cuda_rng_tracker().get_states().items()):
        if isinstance(state, torch.Tensor) and not name.startswith(
            get_expert_parallel_rng_tracker_name()
        ):
            yield f"tracker.{name}", state.clone().view(torch.uint8)
