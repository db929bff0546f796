"""From logical experts to slots: which replica computes which token.

The router chooses experts; this chooses, for each (token, expert) pair, one of the expert's slots,
and widens Megatron's routing map from experts to slots. Its dispatchers then work unchanged, for
they see as many experts as there are slots. No token changes its expert.

Shapes: T tokens of this rank, E logical experts, S slots of the domain, D ranks that send tokens
(tensor- times expert-parallel), R ranks that hold slots (expert-parallel).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_resilient.algorithms.token_assignment import assign_tokens
from megatron_resilient.comm.gather_counts import gather_counts
from megatron_resilient.errors import NonFiniteRouterError


@dataclass(frozen=True, eq=False)  # arrays have no single truth; a new placement is a new map
class SlotMap:
    """Where the slots of one layer are.

    Attributes:
        holding_RC: logical expert of each slot, [R, C]: slot s is on rank s // C.
        by_expert_S: slots sorted by expert, then by number.
    """

    holding_RC: np.ndarray
    by_expert_S: np.ndarray

    @classmethod
    def of(cls, holding: Sequence[Sequence[int]]) -> "SlotMap":
        """Builds the map of a holding, `holding[rank][slot]`."""
        array = np.asarray(holding, dtype=np.int64)
        return cls(array, np.argsort(array.reshape(-1), kind="stable"))


def count_tokens(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, group: dist.ProcessGroup, layer: int
) -> np.ndarray:
    """Gathers how many tokens each rank sends to each expert, [D, E], on every rank.

    Collective over `group`: one all-gather of E + 1 integers per rank, and one copy to the host.

    Raises:
        NonFiniteRouterError: a router gave NaN or infinite probabilities; on every rank of the
            group, before any token is sent.
    """
    counts = torch.cat([routing_map_TE.sum(dim=0), (~torch.isfinite(probs_TE)).sum().view(1)])
    table = gather_counts(counts, group)
    if table[:, -1].any():
        bad = [dist.get_global_rank(group, int(rank)) for rank in np.flatnonzero(table[:, -1])]
        raise NonFiniteRouterError(
            f"layer {layer}: NaN or infinite router probabilities on ranks {bad}; the step is "
            "refused and nothing of it was applied: lower the learning rate, or resume from an "
            "older checkpoint"
        )
    return table[:, :-1]


def split_all_tokens(tokens_DE: np.ndarray, slots: SlotMap) -> tuple[np.ndarray, np.ndarray]:
    """Decides how many of each sender's tokens go to each slot.

    Senders that share an expert-parallel rank (expert tensor parallelism) are assigned together
    and cut their common share in the order of ranks.

    Args:
        tokens_DE: tokens that each sender routes to each expert, [D, E].
        slots: where the slots are.

    Returns:
        (each sender's tokens of each slot, [D, S]; tokens that each rank computes, [R]).
    """
    ranks = slots.holding_RC.shape[0]
    together = tokens_DE.shape[0] // ranks
    tokens_RTE = tokens_DE.reshape(ranks, together, -1)
    assignment = assign_tokens(tokens_RTE.sum(axis=1), slots.holding_RC)
    if together == 1:
        return assignment.split, assignment.rank_tokens
    # The share of expert e runs over its slots in order; senders take consecutive stretches of it.
    order = slots.by_expert_S
    experts = slots.holding_RC.reshape(-1)[order]
    sizes_RS = assignment.split[:, order]
    ends_RS = np.cumsum(sizes_RS, axis=1)
    before_RS = ends_RS - sizes_RS
    first_RS = before_RS[:, np.searchsorted(experts, experts)]  # where the expert's share begins
    begins, ends = (before_RS - first_RS)[:, None], (ends_RS - first_RS)[:, None]
    stop_RTE = tokens_RTE.cumsum(axis=1)
    start_RTE = stop_RTE - tokens_RTE
    own = np.minimum(stop_RTE[..., experts], ends) - np.maximum(start_RTE[..., experts], begins)
    result = np.zeros((ranks, together, order.size), dtype=np.int64)
    result[..., order] = np.maximum(own, 0)
    return result.reshape(tokens_DE.shape[0], -1), assignment.rank_tokens


def widen(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, split_S: np.ndarray, slots: SlotMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends each (token, expert) pair to a slot of the expert.

    The tokens of an expert, in their order, fill its slots in their order.

    Args:
        routing_map_TE: bool, which token goes to which expert.
        probs_TE: the router's weights; gradients flow through.
        split_S: how many of this rank's tokens each slot gets; sums per expert to the map's.
        slots: where the slots are.

    Returns:
        (routing map [T, S], probs [T, S]).
    """
    device = routing_map_TE.device
    order = torch.from_numpy(slots.by_expert_S).to(device)
    counts = torch.from_numpy(split_S[slots.by_expert_S]).to(device)
    expert, token = routing_map_TE.t().nonzero(as_tuple=True)
    slot = torch.repeat_interleave(order, counts, output_size=expert.numel())
    shape = (routing_map_TE.shape[0], split_S.size)
    routing_map_TS = torch.zeros(shape, dtype=torch.bool, device=device)
    routing_map_TS[token, slot] = True
    probs_TS = torch.zeros(shape, dtype=probs_TE.dtype, device=device).index_put(
        (token, slot), probs_TE[token, expert]
    )
    return routing_map_TS, probs_TS
