"""From sets of holders to slots: leftover replicas, nodes, and the ranks inside a node.

All arithmetic is in integers, so that every rank computes the same layout whatever its processor.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.replication import Load

IntArray = npt.NDArray[np.int64]

# All tokens of a layer together, in the unit of `replica_weights`.
_TOTAL_WEIGHT = 1 << 40


def replica_weights(loads: Sequence[Load], replicas: Sequence[int]) -> IntArray:
    """Returns the share of the layer's tokens that one replica of each expert is to expect.

    The unit is 2^-40 of all tokens; without any tokens the weights are zero.
    """
    total = sum(loads) or 1
    return np.array(
        [
            _TOTAL_WEIGHT * load // (total * count)
            for load, count in zip(loads, replicas, strict=True)
        ],
        dtype=np.int64,
    )


def fill_nodes(
    held: npt.NDArray[np.bool_], replicas: Sequence[int], weights: IntArray, slots_per_node: int
) -> IntArray:
    """Puts every replica on a node: one on every given holder, the others where there is room.

    The others go first to nodes that do not hold the expert yet, and among those to the ones that
    expect the fewest tokens; experts with heavy replicas choose first. Replicas added never hurt a
    placement: an expert can only gain holders.

    Args:
        held: Which nodes hold which experts at least, [experts, nodes].
        replicas: Replica count of every expert; they sum to nodes * slots_per_node.
        weights: Expected tokens of one replica of each expert, [experts].
        slots_per_node: Slots of a node.

    Returns:
        Expert in every slot, [nodes, slots_per_node], ascending within a node.
    """
    nodes = held.shape[1]
    copies = held.astype(np.int64).T  # [nodes, experts]
    spare = np.asarray(replicas, dtype=np.int64) - held.sum(axis=1)
    room = slots_per_node - copies.sum(axis=1)
    tokens = copies @ weights
    assert min(spare.min(), room.min()) >= 0
    assert spare.sum() == room.sum()
    for expert in sorted(np.flatnonzero(spare), key=lambda e: (-weights[e], e)):
        while spare[expert]:
            open_nodes = np.flatnonzero(room)
            order = np.lexsort((tokens[open_nodes], copies[open_nodes, expert]))
            chosen = open_nodes[order[: spare[expert]]]
            copies[chosen, expert] += 1
            tokens[chosen] += weights[expert]
            room[chosen] -= 1
            spare[expert] -= len(chosen)
    node, expert_there = np.nonzero(copies)
    return np.repeat(expert_there, copies[node, expert_there]).reshape(nodes, slots_per_node)


def order_by_rank(slots: IntArray, weights: IntArray, ranks_per_node: int) -> IntArray:
    """Orders the slots of every node so that its ranks expect about the same number of tokens.

    Heaviest replica first, each goes to the rank with the fewest tokens that has room, and that
    does not hold the expert yet if there is such a rank: a split of an expert's tokens over two
    slots of one rank balances nothing.

    Args:
        slots: Expert in every slot, [nodes, slots per node].
        weights: Expected tokens of one replica of each expert, [experts].
        ranks_per_node: Ranks g of a node; divides the slots per node. Rank i of a node has the
            slots [i * s, (i + 1) * s) for s = slots per node / g.

    Returns:
        The slots in rank order, ascending within a rank; same shape.
    """
    nodes, slots_per_node = slots.shape
    slots_per_rank = slots_per_node // ranks_per_node
    if ranks_per_node == 1:
        return np.sort(slots, axis=1)
    heaviest_first = np.take_along_axis(
        slots, np.argsort(-weights[slots], axis=1, kind="stable"), axis=1
    )
    ranks = np.full((nodes, ranks_per_node, slots_per_rank), -1, dtype=np.int64)
    used = np.zeros((nodes, ranks_per_node), dtype=np.int64)
    tokens = np.zeros((nodes, ranks_per_node), dtype=np.int64)
    every_node = np.arange(nodes)
    for column in range(slots_per_node):
        expert = heaviest_first[:, column]
        holds = (ranks == expert[:, None, None]).any(axis=2)
        # Ascending by: full, holds it already, tokens, rank.
        worst = np.iinfo(np.int64).max
        cost = np.where(holds, tokens + (worst >> 2), tokens)
        cost[used == slots_per_rank] = worst
        rank = cost.argmin(axis=1)
        ranks[every_node, rank, used[every_node, rank]] = expert
        used[every_node, rank] += 1
        tokens[every_node, rank] += weights[expert]
    return np.sort(ranks, axis=2).reshape(nodes, slots_per_node)
