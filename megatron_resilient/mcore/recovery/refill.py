"""Fills the new world's model and optimizer from what its members kept of the old one."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.training import get_args
from torch import nn

from megatron_resilient.algorithms.migration import EMPTY, plan_migration
from megatron_resilient.algorithms.refill_plan import Piece, RefillPlan, plan_refill
from megatron_resilient.comm.gather_json import gather_json
from megatron_resilient.comm.pieces import exchange
from megatron_resilient.elastic.world import World
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.optimizer_state import single_optimizers, tag_shared
from megatron_resilient.mcore.recovery import arrays, faults
from megatron_resilient.mcore.recovery.arrays import Arrays, Buffers, expert_of
from megatron_resilient.mcore.recovery.old_state import OldState, prepare_moments
from megatron_resilient.mcore.replicas import plan, ranks_per_node, replicated_layers


@dataclass(frozen=True)
class Refill:
    """A refill that is planned, and the same on every rank.

    Attributes:
        plan: copies and what is missing.
        experts_moved: experts that ranks get which they did not have.
        counts: how the optimizers counted their steps; see `old_state.scalars`.
        loads: {layer: tokens per expert} of the newest plan.
    """

    plan: RefillPlan
    experts_moved: int
    counts: dict[str, dict[str, float]]
    loads: dict[int, list[int]]

    @property
    def lost_experts(self) -> list[tuple[int, int]]:
        """(layer, expert) that nobody holds."""
        found = {expert_of(piece.key) for _, piece in self.plan.missing}
        return sorted(expert for expert in found if expert is not None)

    @property
    def lost_dense(self) -> list[str]:
        """Keys of dense state that nobody holds."""
        return sorted({p.key for _, p in self.plan.missing if expert_of(p.key) is None})


def prepare(model: list[nn.Module], optimizer: Any, old: OldState | None, world: World) -> Refill:
    """Places the experts, and plans what has to be copied. Collective over all ranks.

    Args:
        model: the new model chunks.
        optimizer: the new optimizer, which has made no step.
        old: what this rank kept; None for a newcomer.
        world: the new world.
    """
    kept = old.arrays() if old else Arrays()
    told = gather_json(
        {
            "held": kept.pieces(),
            "coordinate": [
                mpu.get_pipeline_model_parallel_rank(),
                mpu.get_expert_tensor_parallel_rank(),
            ],
            "ep": mpu.get_expert_model_parallel_rank(),
            "counts": old.scalars if old else {},
            "loads": sorted(old.loads.items()) if old else [],
        }
    )
    held = [[Piece(*piece) for piece in each["held"]] for each in told]
    loads: dict[int, list[int]] = {}
    for each in told:
        for layer, tokens in each["loads"]:
            loads.setdefault(layer, tokens)
    layers = replicated_layers(model)
    if layers:
        _place(layers, optimizer, told, held, loads)
    counts = next((each["counts"] for each in told if each["counts"]), {})
    own = _to_fill(model, optimizer, counts).pieces()
    wanted = [[Piece(*piece) for piece in each] for each in gather_json(own)]
    plan_ = plan_refill(held, wanted, [seat.node for seat in world.seats])
    moved = {
        (copy.target, expert_of(copy.piece.key))
        for copy in plan_.copies
        if copy.source != copy.target and expert_of(copy.piece.key) is not None
    }
    return Refill(plan_, len(moved), counts, loads)


def carry_out(
    refill: Refill, model: list[nn.Module], optimizer: Any, old: OldState | None, seed_step: int
) -> int:
    """Copies, then has the model take the values. Collective over all ranks.

    Args:
        refill: the plan; what is missing in it keeps the value that it has.
        model: the new model chunks.
        optimizer: the new optimizer.
        old: what this rank kept.
        seed_step: the step, from which experts' random streams begin anew.

    Returns:
        Bytes that this rank sent.
    """
    faults.point("refill")
    kept = old.arrays() if old else Arrays()
    target = _to_fill(model, optimizer, refill.counts)
    sent = exchange(refill.plan.copies, kept.store, target.store)
    arrays.set_random_state(target)
    reseed_experts(seed_step)
    show_to_model(model, optimizer)
    return sent


def show_to_model(model: list[nn.Module], optimizer: Any) -> None:
    """Has the model compute with the values that its optimizer was given. Collective."""
    singles = single_optimizers(optimizer)
    with torch.no_grad():
        for single in singles:
            if hasattr(single, "_copy_main_params_to_model_params"):
                single._copy_main_params_to_model_params()
        if any(isinstance(single, DistributedOptimizer) for single in singles):
            for chunk in model:
                chunk.start_param_sync(force_sync=True)


def _to_fill(model: list[nn.Module], optimizer: Any, counts: dict[str, dict[str, float]]) -> Arrays:
    own = arrays.owned(model, optimizer)
    prepare_moments(own, counts)
    return arrays.everything(own, Buffers(model))


def _place(
    layers: list[ReplicatedMoELayer],
    optimizer: Any,
    told: list[dict[str, Any]],
    held: list[list[Piece]],
    loads: dict[int, list[int]],
) -> None:
    """Gives every layer a placement that fits the new world and moves few experts."""
    ranks = layers[0].ep_group.size()
    stage = mpu.get_pipeline_model_parallel_rank()
    # Expert tensor-parallel peers hold parts of the same experts: the first ones stand for all.
    members = [0] * ranks
    for rank in reversed(range(len(told))):
        if told[rank]["coordinate"] == [stage, 0]:
            members[told[rank]["ep"]] = rank
    experts = [{expert_of(piece.key) for piece in held[rank]} - {None} for rank in members]
    having = [
        [
            sorted(expert for number, expert in own if number == layer.layer_number)
            for own in experts
        ]
        for layer in layers
    ]
    width = max(1, max(len(own) for by_rank in having for own in by_rank))
    before = np.full((len(layers), ranks, width), EMPTY, dtype=np.int64)
    for i, j in itertools.product(range(len(layers)), range(ranks)):
        before[i, j, : len(having[i][j])] = having[i][j]
    even = [1] * layers[0].logical_experts
    wanted = plan([loads.get(layer.layer_number, even) for layer in layers], ranks)
    slots = plan_migration(before, np.asarray(wanted), ranks_per_node(ranks)).slots
    for layer, holding in zip(layers, slots.tolist(), strict=True):
        layer.set_holding(holding)
        for parameters in layer.parameters_by_kind().values():
            for parameter in parameters:
                tag_shared(optimizer, parameter)


def reseed_experts(step: int) -> None:
    """Begins the experts' random streams anew: there may be other expert-parallel ranks now."""
    name = get_expert_parallel_rng_tracker_name()
    tracker = get_cuda_rng_tracker()
    if name not in tracker.get_states():
        return
    seed = get_args().seed + 1024 + 100_003 * step + mpu.get_expert_model_parallel_rank()
    states = tracker.get_states()
    del states[name]
    seeds = set(tracker.seeds_) if hasattr(tracker, "seeds_") else set()
    tracker.set_states(states)
    while seed in seeds:
        seed += 1
    tracker.add(name, seed)
