"""Which replica gets which tokens: a split by source rank and slot that every rank computes alike.

Input are the token counts of all source ranks, which every rank has after one all-gather of E
integers; no rank sends its split to another. The gate's decision is untouched: a token keeps its
expert, and only the copy of the expert that works on it is chosen here.

Two policies decide how much each slot takes:

* `even_quotas`: Algorithm 1 of Lazarus (arXiv 2407.04656, section 4.2). All replicas of an expert
  take the same number of its tokens. That evens out the replicas of one expert, not the ranks.
* `balanced_quotas`: an expert's tokens go to those of its replicas that are on emptier ranks, such
  that the fullest rank is as empty as the placement allows.

Everything is in integers and in compiled code: nothing here loops over tokens, experts or ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.balanced_flow import balance_over_ranks
from megatron_resilient.errors import PlanError

IntArray = npt.NDArray[np.int64]

# Bits of the total that loads are cut to where only the imbalance is of interest.
_IMBALANCE_BITS = 30


@dataclass(frozen=True)
class TokenAssignment:
    """How many tokens go where. A rank can ask for its own part, without the table of all.

    Attributes:
        quotas: Tokens that each slot works on, [ranks, slots per rank].
        policy: "even" or "balanced": how the quotas were chosen.
    """

    quotas: IntArray
    policy: str
    _slots: "_Slots"
    _levels: tuple["_Level", ...]

    @property
    def rank_tokens(self) -> IntArray:
        """Tokens that each rank works on, [ranks]."""
        return self.quotas.sum(axis=1)

    @property
    def imbalance(self) -> float:
        """Max/mean tokens per rank; 1.0 without tokens."""
        return max_over_mean(self.rank_tokens)

    @cached_property
    def split(self) -> IntArray:
        """Tokens that each source rank sends to each slot, [ranks, ranks * slots per rank].

        Slot j is slot j % slots_per_rank of rank j // slots_per_rank.
        """
        every_rank = np.arange(self._slots.ranks)
        return self._table(every_rank, np.arange(self.quotas.size))

    def sent_by(self, rank: int) -> IntArray:
        """Returns the tokens that a rank sends to every slot of every rank, [ranks, slots]."""
        every_slot = np.arange(self.quotas.size)
        return self._table(np.array([rank]), every_slot).reshape(self.quotas.shape)

    def received_by(self, rank: int) -> IntArray:
        """Returns the tokens that a rank gets from every rank for each of its slots, [ranks, s]."""
        slots_per_rank = self.quotas.shape[1]
        own = np.arange(rank * slots_per_rank, (rank + 1) * slots_per_rank)
        return self._table(np.arange(self._slots.ranks), own)

    def _table(self, sources: IntArray, slots: IntArray) -> IntArray:
        position = self._slots.position_of[slots]
        expert = self._slots.sorted_expert[position]
        rank = self._slots.sorted_rank[position]
        table = np.zeros((len(sources), len(slots)), dtype=np.int64)
        for level in self._levels:
            start = np.maximum(level.source_start[sources][:, expert], level.slot_start[position])
            end = np.minimum(level.source_end[sources][:, expert], level.slot_end[position])
            shared = np.maximum(end - start, 0)
            table += np.where(level.cell[sources][:, None] == level.cell[rank], shared, 0)
        return table


def assign_tokens(
    tokens: npt.ArrayLike,
    slot_experts: npt.ArrayLike,
    *,
    policy: str = "best",
    ranks_per_node: int = 1,
) -> TokenAssignment:
    """Splits every rank's tokens of every expert over the slots that hold the expert.

    Tokens stay on their own rank first, then on their own node, and go elsewhere last.

    Args:
        tokens: Tokens of every expert on every source rank, [ranks, experts].
        slot_experts: Expert in every slot, [ranks, slots per rank].
        policy: "even" (Algorithm 1), "balanced", or "best": the one whose fullest rank has fewer
            tokens; Algorithm 1 if both are equal, as it takes less time and moves less.
        ranks_per_node: Ranks of a node; ranks i and j share a node if i // ranks_per_node is
            j // ranks_per_node.

    Returns:
        The split. Sums over an expert's slots are `tokens`: nothing is lost, doubled or re-routed.

    Raises:
        PlanError: Arguments that do not fit together, or tokens of an expert that is nowhere.
    """
    table = _Slots(_integers(tokens, "tokens"), _integers(slot_experts, "slot_experts"))
    if policy not in ("even", "balanced", "best"):
        raise PlanError(f"token assignment policy '{policy}': use even, balanced or best")
    if policy == "balanced":
        quotas = balanced_quotas(table.tokens, table.slot_experts)
    else:
        quotas = even_quotas(table.tokens, table.slot_experts)
        if policy == "best":
            policy = "even"
            fullest = int(quotas.sum(axis=1).max(initial=0))
            # The mean is a bound for both policies: at the mean nothing is left to gain.
            if fullest > -(-int(quotas.sum()) // max(len(quotas), 1)):
                balanced = balanced_quotas(table.tokens, table.slot_experts)
                if int(balanced.sum(axis=1).max(initial=0)) < fullest:
                    quotas, policy = balanced, "balanced"
    every_rank = np.arange(table.ranks)
    cells = [every_rank, every_rank // ranks_per_node, np.zeros_like(every_rank)]
    if ranks_per_node == 1:
        del cells[1]
    return TokenAssignment(quotas, policy, table, _levels(table, quotas, cells))


def even_quotas(tokens: IntArray, slot_experts: IntArray) -> IntArray:
    """Gives every slot of an expert the same number of the expert's tokens, to within one.

    Lazarus (arXiv 2407.04656), section 4.2, Algorithm 1: the capacity p_e of a replica.

    Args:
        tokens: [ranks, experts].
        slot_experts: [ranks, slots per rank].

    Returns:
        Tokens that every slot takes, [ranks, slots per rank].
    """
    table = _Slots(tokens, slot_experts)
    # Whose slots take the odd tokens moves on with the expert, or low ranks would get them all.
    return table.spread(table.total, table.sorted_expert, rotate=True)


def balanced_quotas(tokens: IntArray, slot_experts: IntArray) -> IntArray:
    """Gives every slot as many tokens as make the fullest rank as empty as possible.

    Slots of one expert on one rank share evenly, to within one token. Exact: no quotas for this
    placement have a smaller maximum over ranks (see `balanced_flow`).

    Args:
        tokens: [ranks, experts].
        slot_experts: [ranks, slots per rank].

    Returns:
        Tokens that every slot takes, [ranks, slots per rank].
    """
    table = _Slots(tokens, slot_experts)
    first = table.pair_start
    pair_expert, pair_rank = table.sorted_expert[first], table.sorted_rank[first]
    balanced = balance_over_ranks(
        table.total, pair_expert, pair_rank, tokens[pair_rank, pair_expert], table.ranks
    )
    return table.spread(balanced.quotas, table.pair, rotate=False)


def least_imbalance(
    loads: Sequence[int] | IntArray, slot_experts: npt.NDArray[np.integer]
) -> float:
    """Returns the smallest max/mean tokens per rank that a placement allows for these loads.

    Args:
        loads: Tokens of every expert, [experts].
        slot_experts: Expert in every slot, [ranks, slots per rank].
    """
    slot_experts = _integers(slot_experts, "slot_experts")
    ranks = len(slot_experts)
    total = _integers(loads, "loads")
    # Loads of a long window may be more than can be shared out; their proportions are enough.
    total = total >> max(0, int(total.sum()).bit_length() - _IMBALANCE_BITS)
    # Where the tokens come from does not matter to the fullest rank.
    tokens = np.zeros((ranks, len(total)), dtype=np.int64)
    tokens[0] = total
    return max_over_mean(balanced_quotas(tokens, slot_experts).sum(axis=1))


def max_over_mean(rank_tokens: IntArray) -> float:
    """Returns max/mean of the ranks' tokens; 1.0 without tokens."""
    total = int(rank_tokens.sum())
    return float(rank_tokens.max()) * len(rank_tokens) / total if total else 1.0


class _Slots:
    """The slots of all ranks, sorted by expert and then by rank.

    Attributes:
        tokens: [ranks, experts].
        slot_experts: [ranks, slots per rank].
        total: Tokens of every expert.
        order: Slot at every sorted position.
        position_of: Sorted position of every slot.
        sorted_expert: Its expert.
        sorted_rank: Its rank.
        pair: Number of its (expert, rank), counted in sorted order.
        pair_start: First position of every (expert, rank).
    """

    def __init__(self, tokens: IntArray, slot_experts: IntArray) -> None:
        if tokens.ndim != 2 or slot_experts.ndim != 2 or len(tokens) != len(slot_experts):
            raise PlanError(
                f"tokens {list(tokens.shape)} must be [ranks, experts] and slots "
                f"{list(slot_experts.shape)} [ranks, slots per rank], for the same ranks"
            )
        self.ranks, self.experts = tokens.shape
        self.tokens, self.slot_experts = tokens, slot_experts
        self.total = tokens.sum(axis=0)
        flat = slot_experts.ravel()
        if tokens.size and tokens.min() < 0:
            raise PlanError("token counts must not be negative")
        if flat.size and (flat.min() < 0 or flat.max() >= self.experts):
            raise PlanError(f"slots must hold experts 0 .. {self.experts - 1}")
        self.order = np.argsort(flat, kind="stable")  # slots are numbered by rank
        self.position_of = np.empty_like(self.order)
        self.position_of[self.order] = np.arange(len(flat))
        self.sorted_expert = flat[self.order]
        self.sorted_rank = self.order // max(slot_experts.shape[1], 1)
        key = self.sorted_expert * self.ranks + self.sorted_rank
        starts = np.ones(len(key), dtype=np.bool_)
        starts[1:] = key[1:] != key[:-1]
        self.pair = np.cumsum(starts) - 1
        self.pair_start = np.flatnonzero(starts)
        copies = np.bincount(flat, minlength=self.experts)
        homeless = np.flatnonzero((copies == 0) & (self.total > 0))
        if len(homeless):
            raise PlanError(f"expert {homeless[0]} has tokens, but no slot holds it")

    def spread(self, amount: IntArray, group: IntArray, *, rotate: bool) -> IntArray:
        """Shares the amount of every group evenly over its slots, which are adjacent.

        Args:
            amount: Per group.
            group: Of every sorted slot, ascending.
            rotate: Start with the odd tokens at another slot for every group.

        Returns:
            Amount per slot, [ranks, slots per rank].
        """
        size = np.bincount(group, minlength=len(amount))
        start = np.cumsum(size) - size
        position = np.arange(len(group)) - start[group]
        size_here = size[group]
        if rotate:
            position = (position + group) % size_here
        share = amount[group] // size_here + (position < amount[group] % size_here)
        slots = np.empty(len(group), dtype=np.int64)
        slots[self.order] = share
        return slots.reshape(self.slot_experts.shape)


@dataclass(frozen=True)
class _Level:
    """Sources and slots of one cell (a rank, a node, all ranks) laid along one line per expert.

    A source sends to a slot what their intervals share, so both sides come out exactly.

    Attributes:
        cell: Of every rank.
        source_start: Where the interval of a source begins, [ranks, experts].
        source_end: Where it ends.
        slot_start: Where the interval of a slot begins, [slots] in sorted order.
        slot_end: Where it ends.
    """

    cell: IntArray
    source_start: IntArray
    source_end: IntArray
    slot_start: IntArray
    slot_end: IntArray


def _levels(slots: _Slots, quotas: IntArray, cells: Sequence[IntArray]) -> tuple[_Level, ...]:
    """Decides whose tokens fill every slot: those of its own small cell first, then of larger ones.

    Args:
        slots: The slots.
        quotas: Tokens that every slot takes, [ranks, slots per rank].
        cells: Cell of every rank, ascending; from the smallest cells to the one of all ranks.
    """
    room = quotas.ravel()[slots.order]
    left = slots.tokens
    expert = slots.sorted_expert
    levels: list[_Level] = []
    for cell in cells:
        slot_cell = cell[slots.sorted_rank]
        slot_end = _running_sum(room, expert * slots.ranks + slot_cell)
        source_end = _running_sum(left, cell)
        level = _Level(cell, source_end - left, source_end, slot_end - room, slot_end)
        levels.append(level)
        if len(levels) == len(cells):
            break  # nothing is left for a larger one
        # What finds a place at this level is what the shorter line covers.
        cells_there = int(cell[-1]) + 1 if len(cell) else 0
        there = left
        if cells_there < len(cell):
            there = np.add.reduceat(left, np.flatnonzero(np.diff(cell, prepend=-1)), axis=0)
        wanted = np.zeros((cells_there, slots.experts), dtype=np.int64)
        np.add.at(wanted, (slot_cell, expert), room)
        room = room - np.clip(there[slot_cell, expert] - level.slot_start, 0, room)
        left = left - np.clip(wanted[cell] - level.source_start, 0, left)
    return tuple(levels)


def _running_sum(values: IntArray, group: IntArray) -> IntArray:
    """Returns sums of the rows up to and with each, started anew where the group changes."""
    changes = np.diff(group, prepend=-1) != 0
    if changes.all():
        return values
    total = np.cumsum(values, axis=0)
    before_group = (total - values)[np.flatnonzero(changes)]
    within: IntArray = total - before_group[np.cumsum(changes) - 1]
    return within


def _integers(values: npt.ArrayLike, name: str) -> IntArray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise PlanError(f"{name} must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)
