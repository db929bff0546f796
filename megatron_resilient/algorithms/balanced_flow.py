"""Tokens of experts shared out over ranks so that the fullest rank is as empty as possible.

Each expert's tokens may go to the ranks that hold it. The smallest possible load of the fullest
rank is found exactly: whether a limit can be kept is a maximum flow from experts to ranks, and
where it cannot, the minimum cut names experts that do not fit on their ranks, hence a higher limit
(Newton's method on the parametric cut; it ends after a few flows). All of it runs in compiled code
over the pairs of expert and rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from megatron_resilient.errors import PlanError

IntArray = npt.NDArray[np.int64]

# scipy's maximum flow counts in 32 bits.
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class BalancedQuotas:
    """How many tokens of which expert each rank takes.

    Attributes:
        quotas: Tokens per pair of expert and rank, in the order of the pairs given.
        fullest_rank_tokens: Tokens of the fullest rank: the least that is possible.
    """

    quotas: IntArray
    fullest_rank_tokens: int


def balance_over_ranks(
    tokens: IntArray,
    pair_expert: IntArray,
    pair_rank: IntArray,
    pair_local: IntArray,
    ranks: int,
) -> BalancedQuotas:
    """Shares out every expert's tokens over the ranks that hold it.

    Tokens stay on the rank where they are wherever that does not make the fullest rank fuller.

    Args:
        tokens: Tokens of every expert, [experts].
        pair_expert: Expert of every pair (expert, rank that holds it), [pairs]; no pair twice.
        pair_rank: Rank of every pair, [pairs].
        pair_local: Tokens of the pair's expert that are on the pair's rank already, [pairs].
        ranks: Number of ranks.

    Returns:
        Quotas that sum to `tokens` for every expert.

    Raises:
        PlanError: An expert with tokens that no rank holds, or 2^31 tokens and more.
    """
    experts = len(tokens)
    total = int(tokens.sum())
    if total > MAX_TOKENS:
        raise PlanError(f"{total} tokens in one layer: at most {MAX_TOKENS} can be shared out")
    held_by = np.bincount(pair_expert, minlength=experts)
    if (tokens[held_by == 0] > 0).any():
        expert = int(np.flatnonzero((held_by == 0) & (tokens > 0))[0])
        raise PlanError(f"expert {expert} has tokens, but no rank holds it")

    # Bounds that need no flow: the mean, an expert on all its ranks, a rank with what only it has.
    alone = held_by[pair_expert] == 1
    only_here = np.bincount(pair_rank[alone], tokens[pair_expert[alone]], minlength=ranks)
    limit = max(
        -(-total // ranks),
        int(np.max(-(-tokens // np.maximum(held_by, 1)), initial=0)),
        int(only_here.max(initial=0)),
    )
    while True:
        kept = _keep_local(pair_local, pair_rank, ranks, limit)
        outcome = _share_out(tokens, pair_expert, pair_rank, kept, ranks, limit)
        if isinstance(outcome, int):
            limit = outcome
        else:
            return BalancedQuotas(outcome, limit)


def _keep_local(local: IntArray, pair_rank: IntArray, ranks: int, limit: int) -> IntArray:
    """Returns the local tokens that may stay: all, or a part of each where a rank has too many."""
    on_rank = np.bincount(pair_rank, local, minlength=ranks).astype(np.int64)
    if int(on_rank.max(initial=0)) <= limit:
        return local
    scale = on_rank[pair_rank]
    return np.where(scale > limit, local * limit // np.maximum(scale, 1), local)


def _share_out(
    tokens: IntArray,
    pair_expert: IntArray,
    pair_rank: IntArray,
    kept: IntArray,
    ranks: int,
    limit: int,
) -> IntArray | int:
    """Returns quotas that keep the limit, or a higher limit that no sharing can go below.

    The flow starts from the local tokens kept, so the network is what is left beside them: an edge
    from a rank back to an expert takes local tokens away again.
    """
    experts = len(tokens)
    source, sink = experts + ranks, experts + ranks + 1
    rank_node = experts + pair_rank
    away = tokens - np.bincount(pair_expert, kept, minlength=experts).astype(np.int64)
    free = limit - np.bincount(pair_rank, kept, minlength=ranks).astype(np.int64)
    # Pairs in both directions, so that a flow on one of them has an entry to read.
    tails = np.concatenate(
        [np.full(experts, source), pair_expert, rank_node, experts + np.arange(ranks)]
    )
    heads = np.concatenate([np.arange(experts), rank_node, pair_expert, np.full(ranks, sink)])
    capacity = np.concatenate([away, tokens[pair_expert], kept, free])
    network = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    result = maximum_flow(network, source, sink)
    if result.flow_value == away.sum():
        flow = result.flow.tocsr()
        return kept + np.asarray(flow[pair_expert, rank_node]).ravel()
    residual = network - result.flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, source, return_predecessors=False)
    on_reached_rank = np.zeros(experts + ranks + 2, dtype=np.bool_)
    on_reached_rank[reached] = True
    stuck_tokens = int(tokens[on_reached_rank[:experts]].sum())
    stuck_ranks = int(on_reached_rank[experts : experts + ranks].sum())
    return -(-stuck_tokens // stuck_ranks)
