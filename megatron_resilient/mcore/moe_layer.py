"""Megatron's MoE layer with more slots than experts: some experts are there more than once.

A layer has E logical experts, which the router sees, and S slots, which the dispatcher and the
experts module see as S experts. Between router and dispatcher the routing map is widened from E to
S columns. Everything else is Megatron's.
"""

import copy
import dataclasses
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_resilient.comm.transfer import Holding, plan_fetches, transfer
from megatron_resilient.mcore.experts import slot_parameters
from megatron_resilient.mcore.layer_hooks import LayerHooks
from megatron_resilient.mcore.overlap.plan import LayerOverlap
from megatron_resilient.mcore.parted_layer import PartedMoELayer
from megatron_resilient.mcore.sharded_slots import sharded_slots
from megatron_resilient.mcore.token_dispatcher import (
    SlotMap,
    count_tokens,
    split_all_tokens,
    widen,
)


class ReplicatedMoELayer(PartedMoELayer):
    """An MoE layer whose experts may have several replicas.

    Training is the same as without replicas up to the order of sums, provided that the gradients
    of replicas are summed before the optimizer steps (`grad_sync`).

    Args:
        slots_per_rank: replica slots on each expert-parallel rank.
        first_holding: logical expert of each slot, by rank of the expert-parallel group.
        hooks: PartedMoELayer's.
        overlap: PartedMoELayer's.

    The other arguments are MoELayer's.

    Attributes:
        slots: where the slots are; changed by `set_holding` only, between two steps.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        slots_per_rank: int,
        first_holding: Holding,
        hooks: tuple[LayerHooks, ...] = (),
        overlap: LayerOverlap | None = None,
    ):
        """Builds the layer; the arguments that are not Megatron's stand in the class docstring."""
        pg_collection = pg_collection or get_default_pg_collection()
        assert submodules is not None
        slot_config = copy.copy(config)
        slot_config.num_moe_experts = slots_per_rank * pg_collection.ep.size()
        scratch: list[nn.Module] = []
        super().__init__(
            slot_config,
            dataclasses.replace(
                submodules,
                router=partial(_build_router, submodules.router, config),
                experts=partial(
                    _build_slots, submodules.experts, config, pg_collection.ep, scratch
                ),
            ),
            layer_number,
            pg_collection,
            is_mtp_layer,
            name,
            hooks=hooks,
            overlap=overlap,
        )
        self.logical_experts = config.num_moe_experts
        self.expert_dp_rank = pg_collection.expt_dp.rank()
        self.slots = SlotMap.of(first_holding)
        self._rank_tokens = np.zeros(pg_collection.ep.size(), dtype=np.int64)
        self._fill(scratch[0] if scratch else None)
        self.tag_shared()

    @property
    def holding(self) -> Holding:
        """Logical expert of each slot, `holding[rank][slot]`."""
        return self.slots.holding_RC.tolist()

    def parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """Returns {kind: [parameter of local slot 0, 1, ...]}."""
        return slot_parameters(self.experts, self.num_local_experts)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ):
        """Widens the routing map, then does what MoELayer does."""
        group = self.token_dispatcher.tp_ep_group
        tokens = count_tokens(routing_map, probs, group, self.layer_number)
        split_DS, rank_tokens = split_all_tokens(tokens, self.slots)
        if self.overlap is not None:
            self.overlap.rows_DS = split_DS
        if self.training and torch.is_grad_enabled():  # each training token once
            self._rank_tokens += rank_tokens
        routing_map, probs = widen(routing_map, probs, split_DS[dist.get_rank(group)], self.slots)
        return super().preprocess(hidden_states, probs, routing_map)

    def take_rank_tokens(self) -> list[int]:
        """Returns the tokens that each rank of the domain computed since the last call."""
        tokens = self._rank_tokens.tolist()
        self._rank_tokens[:] = 0
        return tokens

    def set_holding(self, holding: Holding) -> None:
        """Says that the slots now hold these experts.

        The caller has moved their state, and tags the optimizer's copies of the parameters.
        """
        self.slots = SlotMap.of(holding)
        self.tag_shared()

    def first_holder(self, expert: int) -> tuple[int, int]:
        """Returns (rank, slot) of the replica that stands for the expert where one must."""
        holding = self.slots.holding_RC
        rank, slot = divmod(int((holding.reshape(-1) == expert).argmax()), holding.shape[1])
        return rank, slot

    def tag_shared(self) -> None:
        """Marks all replicas but the first as shared: gradient norms count an expert once."""
        rank = dist.get_rank(self.ep_group)
        for parameters in self.parameters_by_kind().values():
            for slot, parameter in enumerate(parameters):
                expert = int(self.slots.holding_RC[rank, slot])
                parameter.shared = self.first_holder(expert) != (rank, slot)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Saves each logical expert once, in stock's form; loads it into all its replicas."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        stacked = not (metadata or {}).get("singleton_local_shards", False)
        axis = len(sharded_offsets) if stacked else None
        return sharded_slots(state, f"{prefix}experts.", self, axis)

    def _fill(self, scratch: nn.Module | None) -> None:
        """Gives the slots the initial weights that stock Megatron would give their experts."""
        ranks = dist.get_world_size(self.ep_group)
        held = [_experts_drawn(self.logical_experts, ranks, rank) for rank in range(ranks)]
        drawn = len(held[dist.get_rank(self.ep_group)])
        own = slot_parameters(scratch, drawn) if scratch is not None else {}
        targets = self.parameters_by_kind()
        transfer(
            plan_fetches(held, self.holding),
            [[p.data for p in own.get(kind, ())] for kind in targets],
            [[p.data for p in parameters] for parameters in targets.values()],
            self.ep_group,
        )


def _experts_drawn(experts: int, ranks: int, rank: int) -> list[int]:
    """Experts whose initial weights a rank draws: stock's own where EP divides their number."""
    return list(range(rank * experts // ranks, (rank + 1) * experts // ranks))


def _build_router(
    builder: Any, logical_config: TransformerConfig, /, *, config: Any, **kwargs: Any
) -> nn.Module:
    return builder(config=logical_config, **kwargs)


def _build_slots(
    builder: Any,
    logical_config: TransformerConfig,
    ep_group: dist.ProcessGroup,
    scratch: list[nn.Module],
    num_local_experts: int,
    slot_config: TransformerConfig,
    /,
    **kwargs: Any,
) -> nn.Module:
    """Builds the slots, and stock's experts into `scratch`, from the same random numbers.

    The slots consume none: whatever is drawn afterwards, in this layer and in later ones, is what
    stock Megatron draws.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = (tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state())
    slots = builder(num_local_experts, slot_config, **kwargs)
    tracker.set_states(before[0])
    torch.set_rng_state(before[1])
    torch.cuda.set_rng_state(before[2])
    drawn = _experts_drawn(logical_config.num_moe_experts, ep_group.size(), ep_group.rank())
    if drawn:
        scratch.append(builder(len(drawn), logical_config, **kwargs))
    return slots
