"""The best placement of a small layer, found and proven by branch and bound."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms.loss_tables import LossMeasure, LossTable


@dataclass(frozen=True)
class SearchResult:
    """What the search knows at its end.

    Attributes:
        holders: Set of nodes that hold each expert (see `node_sets`); None if nothing better than
            what was known before was found.
        complete: Whether everything was searched: then nothing better exists.
        effort: Sets of nodes that were weighed.
    """

    holders: tuple[int, ...] | None
    complete: bool
    effort: int


class _BudgetSpentError(Exception):
    pass


def search_placement(
    replicas: Sequence[int],
    slots_per_node: int,
    table: LossTable,
    measure: LossMeasure,
    *,
    min_distinct: Sequence[int],
    kinds: Sequence[Hashable],
    known_cost: float | None = None,
    already_fatal: int = 0,
    budget: int = 100_000,
) -> SearchResult:
    """Looks for sets of holders whose fatal losses weigh least.

    Experts get their nodes one by one, the least replicated first, and cheapest sets first. A
    branch ends when the losses that are fatal already weigh as much as the best placement known.
    A branch is explored once only, whatever the order of experts that led to it, and nodes that are
    alike and hold the same experts so far are tried in one order only.

    That slots are filled to the last needs no attention: a replica more never hurts, so sets of at
    most `replicas` nodes are searched, and what is left over is put anywhere.

    Args:
        replicas: Replica counts in ascending order.
        slots_per_node: Slots of a node.
        table: Of the cluster's nodes.
        measure: Weighs families of losses.
        min_distinct: Fewest nodes for every expert.
        kinds: Of every node; nodes of equal kind are alike (to `measure` and `already_fatal`).
        known_cost: Only what weighs less than this is of interest.
        already_fatal: Losses that are fatal whatever this layer does.
        budget: Sets of nodes to weigh before giving up. Counted, not timed, so that all ranks stop
            at the same point.
    """
    search = _Search(
        replicas, slots_per_node, table, measure, min_distinct, kinds, known_cost, budget
    )
    try:
        search.place(0, (slots_per_node,) * table.nodes, tuple(kinds), already_fatal, ())
        complete = True
    except _BudgetSpentError:
        complete = False
    return SearchResult(search.best, complete, search.effort)


class _Search:
    def __init__(
        self,
        replicas: Sequence[int],
        slots_per_node: int,
        table: LossTable,
        measure: LossMeasure,
        min_distinct: Sequence[int],
        kinds: Sequence[Hashable],
        known_cost: float | None,
        budget: int,
    ) -> None:
        self._replicas = replicas
        self._table = table
        self._measure = measure
        self._min_distinct = min_distinct
        self._limit = float("inf") if known_cost is None else measure.limit(known_cost)
        self._budget = budget
        self._seen: set[tuple[int, tuple[int, ...], int]] = set()
        self.best: tuple[int, ...] | None = None
        self.effort = 0

    def place(
        self,
        expert: int,
        free: tuple[int, ...],
        alike: tuple[Hashable, ...],
        fatal: int,
        holders: tuple[int, ...],
    ) -> None:
        """Gives nodes to `expert` and all after it.

        Args:
            expert: The next expert.
            free: Free slots of every node.
            alike: Key of every node; nodes with equal keys can be exchanged.
            fatal: Losses that are fatal already.
            holders: Nodes of the experts before.
        """
        if expert == len(self._replicas):
            self.best = holders
            self._limit = self._measure.limit(self._measure(fatal))
            return
        # However the experts left are placed: where too few free slots are kept, one is lost.
        fatal |= self._table.keeping_less_than(len(self._replicas) - expert, free)
        state = (expert, free, fatal)
        if state in self._seen or self._measure(fatal) >= self._limit:
            return
        self._seen.add(state)
        options = []
        for nodes in self._node_sets(expert, free, alike):
            self.effort += 1
            if self.effort > self._budget:
                raise _BudgetSpentError
            then_fatal = fatal | self._table.losing_all(nodes)
            cost = self._measure(then_fatal)
            if cost < self._limit:
                options.append((cost, -nodes.bit_count(), nodes, then_fatal))
        for cost, _, nodes, then_fatal in sorted(options):
            if cost >= self._limit:  # which may have come down meanwhile
                break
            self.place(
                expert + 1,
                tuple(slots - (nodes >> node & 1) for node, slots in enumerate(free)),
                tuple(
                    (key, expert) if nodes >> node & 1 else key for node, key in enumerate(alike)
                ),
                then_fatal,
                (*holders, nodes),
            )

    def _node_sets(
        self, expert: int, free: tuple[int, ...], alike: tuple[Hashable, ...]
    ) -> Iterator[int]:
        """Yields the sets of nodes that the expert may get, one of each kind."""
        groups: dict[Hashable, list[int]] = {}
        for node, slots in enumerate(free):
            if slots:
                groups.setdefault(alike[node], []).append(node)
        prefixes = []
        for nodes in groups.values():
            sets = [0]
            for node in nodes:
                sets.append(sets[-1] | 1 << node)
            prefixes.append(sets)
        fewest = max(1, self._min_distinct[expert])
        yield from _unions(prefixes, 0, 0, fewest, self._replicas[expert])


def _unions(
    prefixes: Sequence[Sequence[int]], group: int, chosen: int, fewest: int, most: int
) -> Iterator[int]:
    """Yields the unions of one prefix per group that have between `fewest` and `most` nodes."""
    if group == len(prefixes):
        if fewest <= 0:
            yield chosen
        return
    for size, nodes in enumerate(prefixes[group]):
        if size > most:
            break
        yield from _unions(prefixes, group + 1, chosen | nodes, fewest - size, most - size)
