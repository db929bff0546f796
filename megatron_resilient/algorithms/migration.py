"""From one placement to another with few moves: who takes which part, and who sends what to whom.

Nodes of a plan are free labels, so a plan is fitted to the nodes that are there: one permutation of
nodes for all layers, chosen such that as few experts as possible have to be fetched. What is still
missing is fetched from owners such that no owner sends much more than the others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from megatron_resilient.algorithms.balanced_flow import balance_over_ranks
from megatron_resilient.errors import PlanError

IntArray = npt.NDArray[np.int64]

# In a slot that holds nothing: on a rank that has just joined, say.
EMPTY = -1


class Fetches(NamedTuple):
    """States of experts to be moved, one entry per move, sorted by layer, expert, destination.

    Attributes:
        layer: Layer of the expert.
        expert: Logical expert.
        source: Rank that sends.
        destination: Rank that receives.
    """

    layer: IntArray
    expert: IntArray
    source: IntArray
    destination: IntArray


@dataclass(frozen=True)
class Migration:
    """How to get to a new placement.

    Attributes:
        node_of: Node that takes the part of every node of the plan; a permutation.
        rank_of: Rank that takes the part of every rank of the plan; ranks stay within nodes.
        slots: Expert in every slot after the move, by the ranks that are there,
            [layers, ranks, slots per rank].
        fetches: The moves. A rank fetches an expert once, however many slots hold it there.
        missing: Experts that no rank holds any more, as rows (layer, expert, destination rank):
            they must come from elsewhere (a snapshot, a checkpoint).
    """

    node_of: IntArray
    rank_of: IntArray
    slots: IntArray
    fetches: Fetches
    missing: IntArray

    def sent_by(self) -> IntArray:
        """Returns how many experts each rank sends."""
        return np.bincount(self.fetches.source, minlength=self.slots.shape[1])


def plan_migration(
    held: npt.NDArray[np.integer], target: npt.NDArray[np.integer], ranks_per_node: int = 1
) -> Migration:
    """Fits a placement to what ranks hold, and plans the moves.

    Lazarus (arXiv 2407.04656), section 4.3, with an exact assignment where the paper maps greedily,
    and one permutation for all layers, so that layers keep their common order of nodes.

    Args:
        held: Expert in every slot now, [layers, ranks, slots per rank]; `EMPTY` where there is
            none. Ranks are those of the new world: survivors and newcomers.
        target: Expert in every slot by the plan, [layers, ranks, slots per rank]; the number of
            slots may differ.
        ranks_per_node: Ranks of a node.

    Returns:
        The migration; the same on every rank.

    Raises:
        PlanError: Arguments that do not fit together.
    """
    before, after = held.astype(np.int64), target.astype(np.int64)
    if before.ndim != 3 or after.ndim != 3 or before.shape[:2] != after.shape[:2]:
        raise PlanError(
            f"placements of shapes {list(held.shape)} and {list(target.shape)}: both must be "
            "[layers, ranks, slots per rank] for the same layers and ranks"
        )
    layers, ranks, _ = after.shape
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise PlanError(f"{ranks} ranks do not form nodes of {ranks_per_node} ranks")
    if after.size and after.min() < 0:
        raise PlanError("the new placement has an empty slot")
    experts = int(max(before.max(initial=0), after.max(initial=0))) + 1
    holding = _incidence(before, experts)
    wanting = _incidence(after, experts)

    nodes = ranks // ranks_per_node
    common = _per_node(holding, ranks_per_node) @ _per_node(wanting, ranks_per_node).T
    node_of = assign_nodes(common.toarray())
    rank_of = (node_of[:, None] * ranks_per_node + np.arange(ranks_per_node)).ravel()
    if ranks_per_node > 1:
        rank_of = _assign_ranks(holding, wanting, rank_of, nodes, ranks_per_node)
    part_of = np.argsort(rank_of)
    fetches, missing = _fetches(holding, wanting[part_of], layers, experts, ranks_per_node)
    return Migration(node_of, rank_of, after[:, part_of], fetches, missing)


def assign_nodes(common: npt.NDArray[np.integer]) -> IntArray:
    """Returns the node for every part such that most experts are where they are needed. Exact.

    Of equally good permutations, one that leaves many nodes in their own part is taken.

    Args:
        common: How many experts (of all layers) of part q node p holds, [nodes p, parts q].
    """
    gain = common.astype(np.float64) * (len(common) + 1) + np.eye(len(common))
    nodes, parts = linear_sum_assignment(gain, maximize=True)
    node_of = np.empty(len(common), dtype=np.int64)
    node_of[parts] = nodes
    return node_of


def assign_nodes_greedily(common: npt.NDArray[np.integer]) -> IntArray:
    """Returns the node for every part, always mapping the pair next that has most in common.

    The mapping of Lazarus (arXiv 2407.04656), section 4.3, here to check the exact one against.

    Args:
        common: How many experts (of all layers) of part q node p holds, [nodes p, parts q].
    """
    left = common.astype(np.int64)
    node_of = np.empty(len(left), dtype=np.int64)
    for _ in range(len(left)):
        node, part = divmod(int(left.argmax()), len(left))
        node_of[part] = node
        left[node, :] = -1
        left[:, part] = -1
    return node_of


def _incidence(slots: IntArray, experts: int) -> csr_array:
    """Returns which rank holds which expert of which layer, [ranks, layers * experts], ones."""
    layers, ranks, _ = slots.shape
    layer, rank, _ = np.nonzero(slots != EMPTY)
    column = layer * experts + slots[slots != EMPTY]
    held = csr_array(
        (np.ones(len(rank), dtype=np.int64), (rank, column)), shape=(ranks, layers * experts)
    )
    held.sum_duplicates()
    held.data[:] = 1
    return held


def _per_node(by_rank: csr_array, ranks_per_node: int) -> csr_array:
    ranks, columns = by_rank.shape
    entries = by_rank.tocoo()
    held = csr_array(
        (entries.data, (entries.coords[0] // ranks_per_node, entries.coords[1])),
        shape=(ranks // ranks_per_node, columns),
    )
    held.sum_duplicates()
    held.data[:] = 1
    return held


def _assign_ranks(
    holding: csr_array, wanting: csr_array, rank_of: IntArray, nodes: int, ranks_per_node: int
) -> IntArray:
    """Lets the ranks of every node take the parts of which they hold most."""
    common = np.zeros((nodes, ranks_per_node, ranks_per_node), dtype=np.int64)
    offset = np.arange(nodes) * ranks_per_node
    for own in range(ranks_per_node):
        for part in range(ranks_per_node):
            rows = holding[rank_of[offset + own]].multiply(wanting[offset + part])
            common[:, own, part] = rows.sum(axis=1)
    return np.concatenate(
        [
            rank_of[first : first + ranks_per_node][assign_nodes(in_node)]
            for first, in_node in zip(offset, common, strict=True)
        ]
    )


def _fetches(
    holding: csr_array, wanting: csr_array, layers: int, experts: int, ranks_per_node: int
) -> tuple[Fetches, IntArray]:
    """Chooses a source for everything that is wanted where it is not held.

    A rank of the same node if one has it; else the owners share the sending so that the busiest of
    them has as little as possible to send.
    """
    ranks = wanting.shape[0]
    needed = (wanting - wanting.multiply(holding)).tocoo()
    present = needed.data > 0
    destination, item = needed.coords[0][present], needed.coords[1][present]
    order = np.lexsort((destination, item))
    destination, item = destination[order].astype(np.int64), item[order].astype(np.int64)

    owned = holding.tocsc()
    owners_of = np.diff(owned.indptr)
    lost = owners_of[item] == 0
    missing = np.stack([item[lost] // experts, item[lost] % experts, destination[lost]], axis=1)
    destination, item = destination[~lost], item[~lost]

    source = np.full(len(item), EMPTY)
    if ranks_per_node > 1:
        columns = holding.shape[1]
        entries = holding.tocoo()
        keys = np.sort(entries.coords[0].astype(np.int64) * columns + entries.coords[1])
        first_rank = destination - destination % ranks_per_node
        for neighbour in range(ranks_per_node)[::-1]:  # the first one that has it stays
            key = (first_rank + neighbour) * columns + item
            found = keys[np.minimum(np.searchsorted(keys, key), len(keys) - 1)] == key
            source[found] = first_rank[found] + neighbour

    far = np.flatnonzero(source == EMPTY)
    items, item_number, wanted = np.unique(item[far], return_inverse=True, return_counts=True)
    pair_item = np.repeat(np.arange(len(items)), owners_of[items])
    pair_owner = np.concatenate(
        [owned.indices[owned.indptr[i] : owned.indptr[i + 1]] for i in items]
        or [np.empty(0, dtype=np.int64)]
    ).astype(np.int64)
    if len(far):
        shares = balance_over_ranks(
            wanted, pair_item, pair_owner, np.zeros(len(pair_item), dtype=np.int64), ranks
        )
        # Fetches of an item are adjacent, and so are its owners.
        assert (np.diff(item_number) >= 0).all()
        source[far] = np.repeat(pair_owner, shares.quotas)
    return Fetches(item // experts, item % experts, source, destination), missing
