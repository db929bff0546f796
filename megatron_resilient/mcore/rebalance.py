"""Looks at the load now and then, and moves experts where that pays."""

import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from torch import nn

from megatron_resilient.algorithms.migration import plan_migration
from megatron_resilient.algorithms.token_assignment import least_imbalance
from megatron_resilient.comm.transfer import (
    Fetch,
    Holding,
    Received,
    keep_places,
    plan_fetches,
    receive,
)
from megatron_resilient.config import ReplicaConfig
from megatron_resilient.errors import PlanMismatchError
from megatron_resilient.mcore.expert_load import ExpertLoad
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.optimizer_state import state_tensors, tag_shared
from megatron_resilient.mcore.recovery import faults
from megatron_resilient.mcore.replicas import plan, ranks_per_node

# Part of a step that balance can shorten, assumed when a move is weighed against its cost.
EXPERT_SHARE = 0.5


@dataclass(frozen=True)
class Move:
    """A rebalancing that was carried out.

    Attributes:
        imbalance_before: max/mean tokens per rank of the old placement, mean over layers.
        imbalance_after: the same for the new one.
        bytes: expert state that this domain sent between ranks.
        seconds: how long training waited.
    """

    imbalance_before: float
    imbalance_after: float
    bytes: int
    seconds: float


class Rebalancer:
    """Plans and moves between steps. The same decisions on every rank of a pipeline stage.

    Args:
        model: the model chunks, whose routers are counted.
        layers: the replicated layers in them.
        optimizer: Megatron's optimizer, whose state moves with the weights.
        config: flags.

    Attributes:
        loads: {layer: tokens per expert} of the last window that was looked at.
    """

    def __init__(
        self,
        model: list[nn.Module],
        layers: list[ReplicatedMoELayer],
        optimizer: Any,
        config: ReplicaConfig,
    ):
        self._layers = layers
        self._optimizer = optimizer
        self._config = config
        self.loads: dict[int, list[int]] = {}
        self._load = ExpertLoad(model)
        self._step_seconds: list[float] = []
        self._bytes_per_second: float | None = None
        self._staged: list[tuple[int, int, str, dict[str, torch.Tensor]]] = []

    def after_step(self, step: int, seconds: float) -> Move | None:
        """Rebalances if it is time and it pays. Collective.

        Args:
            step: steps done.
            seconds: duration of the last one.

        Returns:
            What was done, None if nothing was.
        """
        interval = self._config.rebalance_interval
        self._step_seconds.append(seconds)
        if not interval:
            return None
        window = self._config.load_window or interval
        if step % interval == (interval - window) % interval and window != interval:
            self._load.take(_stage_group())  # older steps do not count
        if step % interval:
            return None
        loads = self._load.take(_stage_group())
        self.loads = loads
        return self._rebalance([loads[layer.layer_number] for layer in self._layers])

    def adopt(self, holdings: list[Holding]) -> None:
        """Moves experts to the given holdings of all layers. Collective.

        Raises:
            PlanMismatchError: ranks were given different ones.
        """
        _check_same_plan(holdings, self._layers[0].ep_group)
        for layer, holding in zip(self._layers, holdings, strict=True):
            self._move(layer, holding, plan_fetches(layer.holding, holding))

    def _rebalance(self, loads: list[list[int]]) -> Move | None:
        start = time.perf_counter()
        group = self._layers[0].ep_group
        old = [layer.holding for layer in self._layers]
        new, fetches = _plan_move(loads, old, dist.get_world_size(group))
        _check_same_plan(new, group)
        before, after = _imbalance(loads, old), _imbalance(loads, new)
        if not self._pays(before, after, fetches):
            self._step_seconds.clear()
            return None
        sent = 0
        for layer, holding, own in zip(self._layers, new, fetches, strict=True):
            sent += self._move(layer, holding, own)
        total = torch.tensor([sent], dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(total, group=group)
        seconds = time.perf_counter() - start
        moved = int(total.item())
        # The slowest rank's time, so that all ranks weigh the next move alike.
        slowest = torch.tensor([seconds], device=torch.cuda.current_device())
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        self._bytes_per_second = moved / slowest.item() if moved else self._bytes_per_second
        self._step_seconds.clear()
        return Move(before, after, moved, seconds)

    def _pays(self, before: float, after: float, fetches: list[list[Fetch]]) -> bool:
        if self._config.rebalance_threshold == 0:
            return True
        if before - after < self._config.rebalance_threshold:
            return False
        if self._bytes_per_second is None:
            return True  # the first move measures what moves cost
        remote = sum(f.source[0] != f.target[0] for own in fetches for f in own)
        cost_seconds = remote * self._slot_bytes() / self._bytes_per_second
        step_seconds = _agreed(statistics.median(self._step_seconds), self._layers[0].ep_group)
        gain_seconds = EXPERT_SHARE * step_seconds * (1 - after / before)
        return gain_seconds * self._config.rebalance_interval > cost_seconds

    def _slot_bytes(self) -> int:
        tensors = self._tensors(self._layers[0])
        return sum(slots[0].numel() * slots[0].element_size() for slots in tensors)

    def _tensors(self, layer: ReplicatedMoELayer) -> list[list[torch.Tensor]]:
        """Returns all that moves with an expert of a layer, kind by kind and slot by slot."""
        kinds: list[list[torch.Tensor]] = []
        for parameters in layer.parameters_by_kind().values():
            kinds.append([parameter.data for parameter in parameters])
            states = [state_tensors(self._optimizer, parameter) for parameter in parameters]
            kinds += [[state[name] for state in states] for name in states[0]]
        return kinds

    def staged(self) -> list[tuple[int, int, str, dict[str, torch.Tensor]]]:
        """Returns what arrived in a move that was cut short: its sender may have it no longer.

        Returns:
            (layer, expert, kind of parameter, {"main": fp32 values, name of a moment: it}).
        """
        return self._staged

    def _move(self, layer: ReplicatedMoELayer, holding: Holding, fetches: list[Fetch]) -> int:
        tensors = self._tensors(layer)
        changed = [f for f in fetches if f.source != f.target]
        faults.point("migration")
        if changed:
            received = receive(changed, tensors, tensors, layer.ep_group)
            self._staged = self._named(layer, received)
            # Nobody gives up an expert before everybody has what it is to hold.
            dist.barrier(group=layer.ep_group)
            received.put(tensors)
        layer.set_holding(holding)
        for parameters in layer.parameters_by_kind().values():
            for parameter in parameters:
                tag_shared(self._optimizer, parameter)
        self._staged = []
        return received.sent_bytes if changed else 0

    def _named(
        self, layer: ReplicatedMoELayer, received: Received
    ) -> list[tuple[int, int, str, dict[str, torch.Tensor]]]:
        """Names what was received by parameter and state, in the order of `_tensors`."""
        names = []
        for kind, parameters in layer.parameters_by_kind().items():
            states = state_tensors(self._optimizer, parameters[0])
            # Without a copy of its own, the parameter itself is what the optimizer steps.
            names.append((kind, "weights" if "main" in states else "main"))
            names += [(kind, name) for name in states]
        staged: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        for fetch, number, piece in received.pieces:
            kind, name = names[number]
            if name != "weights":
                staged.setdefault((fetch.expert, kind), {})[name] = piece
        return [(layer.layer_number, *key, state) for key, state in staged.items()]


def _plan_move(
    loads: list[list[int]], old: list[Holding], ranks: int
) -> tuple[list[Holding], list[list[Fetch]]]:
    """Plans new holdings, given to the ranks that have most of them already, and the fetches."""
    migration = plan_migration(
        np.asarray(old), np.asarray(plan(loads, ranks)), ranks_per_node(ranks)
    )
    sources: list[dict[tuple[int, int], int]] = [{} for _ in old]
    for layer, expert, source, target in zip(*map(list, migration.fetches), strict=True):
        sources[layer][int(expert), int(target)] = int(source)
    new: list[Holding] = [
        keep_places(before, after.tolist())
        for before, after in zip(old, migration.slots, strict=True)
    ]
    return new, [plan_fetches(*each) for each in zip(old, new, sources, strict=True)]


def _stage_group() -> dist.ProcessGroup:
    return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _imbalance(loads: list[list[int]], holdings: list[Holding]) -> float:
    """Returns max/mean tokens per rank, mean over layers."""
    return statistics.fmean(
        least_imbalance(np.asarray(own), np.asarray(holding))
        for own, holding in zip(loads, holdings, strict=True)
    )


def _agreed(seconds: float, group: dist.ProcessGroup) -> float:
    value = torch.tensor([seconds], device=torch.cuda.current_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value.item())


def _check_same_plan(holdings: list[Holding], group: dist.ProcessGroup) -> None:
    """Raises PlanMismatchError if a rank of the group planned something else."""
    digest = hashlib.sha256(repr(holdings).encode()).digest()
    own = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([own, -own], dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise PlanMismatchError(
            f"rank {dist.get_rank()} planned another placement than a peer: install the same "
            "versions of megatron-resilient, numpy and scipy on every node"
        )
