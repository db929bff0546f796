"""One layer on its way from replica counts to slots."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from operator import itemgetter

import numpy as np

from megatron_resilient.algorithms import layer_design, node_sets, slot_layout
from megatron_resilient.algorithms.block_design import NodeClass
from megatron_resilient.algorithms.layer_design import LayerDesign
from megatron_resilient.algorithms.node_order import holders_by_class
from megatron_resilient.algorithms.replication import Load
from megatron_resilient.algorithms.slot_layout import IntArray
from megatron_resilient.algorithms.token_assignment import least_imbalance

# Loads are scaled to this sum where only their proportions matter.
_SCALED_TOKENS = 1 << 24

# Where the imbalance asked for is out of reach, up to this factor above the best is good enough.
_CLOSE_TO_BEST = 1.05


class LayerPlan:
    """What is known about a layer, from the general (a design) to the particular (holders).

    Designs know experts by their position in the ascending order of replica counts; `experts` says
    which expert has which position. Experts with equally many replicas may exchange positions
    without consequence for survival, and do so for balance.

    Attributes:
        replicas: Replica counts by position.
        experts: Expert at every position.
        min_distinct: Fewest distinct nodes by position.
        classes: The design.
        parts: Nodes of every class of the design.
        holders: Nodes that hold the expert of every position at least.
        method: How the layer was placed.
        optimal: As in `Placement`.
    """

    def __init__(
        self,
        replicas: Sequence[int],
        loads: Sequence[Load],
        nodes: int,
        slots_per_node: int,
        min_replicas: int,
    ) -> None:
        self.nodes = nodes
        self.slots_per_node = slots_per_node
        self.experts = sorted(range(len(replicas)), key=lambda e: (replicas[e], loads[e], e))
        self.replicas = tuple(replicas[e] for e in self.experts)
        self.min_distinct = tuple(min(count, min_replicas, nodes) for count in self.replicas)
        self._loads = [loads[e] for e in self.experts]
        self._weights = slot_layout.replica_weights(self._loads, self.replicas)
        self._ascending = self.experts, self._loads, self._weights
        self.classes: tuple[NodeClass, ...] = ()
        self.parts: tuple[int, ...] = ()
        self.holders: tuple[int, ...] = ()
        self.method = ""
        self.optimal: bool | None = None

    @property
    def design(self) -> LayerDesign:
        """The design as it is now."""
        return LayerDesign(self.classes, self.method, self.optimal)

    def adopt(self, design: LayerDesign) -> None:
        """Takes a design, on the nodes 0, 1, .. in turn."""
        self.classes, self.method, self.optimal = design.classes, design.method, design.optimal
        self._exchange_equals()
        start, parts = 0, []
        for own in self.classes:
            parts.append((1 << own.nodes) - 1 << start)
            start += own.nodes
        self.seat(parts)

    def adopt_weaker(self, classes: tuple[NodeClass, ...], method: str) -> None:
        """Takes a design for another reason than survival, and says so if that costs something."""
        known = layer_design.fatal_losses(self.classes, self.nodes)
        weaker = layer_design.excess(layer_design.fatal_losses(classes, self.nodes), known) > 0
        self.adopt(LayerDesign(classes, method, False if weaker else self.optimal))

    def hold(self, holders: Sequence[int], method: str) -> None:
        """Takes nodes for every position, whatever the design was."""
        self.holders, self.method = tuple(holders), method

    def allowed(self, classes: Sequence[NodeClass]) -> tuple[NodeClass, ...] | None:
        """Returns the design with every expert on its minimum of distinct nodes, if possible."""
        return layer_design.with_min_distinct(
            classes, self.replicas, self.slots_per_node, self.min_distinct
        )

    def seat(self, parts: Sequence[int]) -> None:
        """Takes the nodes of every class of the design."""
        self.parts = tuple(parts)
        held = holders_by_class(self.classes, self.parts)
        self.holders = tuple(held[position] for position in range(len(self.replicas)))

    def slots(self, ranks_per_node: int) -> IntArray:
        """Returns the expert in every slot, [nodes, slots per node], in rank order."""
        held = node_sets.to_rows(self.holders, self.nodes)
        filled = slot_layout.fill_nodes(held, self.replicas, self._weights, self.slots_per_node)
        ordered = slot_layout.order_by_rank(filled, self._weights, ranks_per_node)
        by_rank = np.array(self.experts)[ordered].reshape(self.nodes * ranks_per_node, -1)
        by_rank.sort(axis=1)
        return by_rank.reshape(self.nodes, self.slots_per_node)

    def imbalance(self, ranks_per_node: int) -> float:
        """Returns max/mean tokens per rank when the loads are assigned to the emptiest ranks."""
        total = sum(self._loads)
        if not total:
            return 1.0
        scaled = np.zeros(len(self.experts), dtype=np.int64)
        scaled[self.experts] = [load * _SCALED_TOKENS // total for load in self._loads]
        slots = self.slots(ranks_per_node)
        return least_imbalance(scaled, slots.reshape(self.nodes * ranks_per_node, -1))

    def balance(self, max_imbalance: float, ranks_per_node: int) -> None:
        """Gives up survivable losses for balance until `max_imbalance` is kept, if it can be.

        Keeps as few slots of every node as possible free for leftover replicas of much-used
        experts, found by doubling and then halving. Where the limit cannot be kept, the best
        balance that can be is the limit.
        """
        survivable = self.design
        found = {0: (self.imbalance(ranks_per_node), survivable)}

        def keeps_limit(reserved: int) -> bool:
            classes = layer_design.reserved_design(
                self.replicas, self.nodes, self.slots_per_node, reserved
            )
            allowed = None if classes is None else self.allowed(classes)
            if allowed is None:
                return False
            self.adopt(survivable)
            self.adopt_weaker(allowed, f"{reserved} slots of a node for balance")
            found[reserved] = self.imbalance(ranks_per_node), self.design
            return found[reserved][0] <= max_imbalance

        if found[0][0] > max_imbalance:
            most = self.slots_per_node - -(-len(self.replicas) // self.nodes)
            too_few, enough = 0, 1
            while enough < most and not keeps_limit(enough):
                too_few, enough = enough, min(2 * enough, most)
            while enough - too_few > 1:
                middle = (too_few + enough) // 2
                too_few, enough = (too_few, middle) if keeps_limit(middle) else (middle, enough)
            if enough == most and most not in found:
                keeps_limit(most)
        best, _ = min(found.values(), key=itemgetter(0))
        limit = max_imbalance if best <= max_imbalance else best * _CLOSE_TO_BEST
        self.adopt(next(found[key][1] for key in sorted(found) if found[key][0] <= limit))

    def _exchange_equals(self) -> None:
        """Deals experts with equally many replicas to their positions so that nodes balance."""
        experts, loads, weights = self._ascending  # not from where an earlier design put them
        seats: list[tuple[int, ...]] = [()] * len(self.replicas)
        for index, own in enumerate(self.classes):
            for position in own.experts:
                seats[position] = (*seats[position], index)
        equals: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for position, count in enumerate(self.replicas):
            equals.setdefault(count, {}).setdefault(seats[position], []).append(position)
        expected = [0] * len(self.classes)  # tokens of one node of the class

        def on_seat(seat: tuple[int, ...]) -> int:
            nodes = sum(self.classes[index].nodes for index in seat)
            return sum(expected[index] * self.classes[index].nodes for index in seat) // nodes

        dealt = list(range(len(self.replicas)))
        # What has no choice counts before what has.
        for by_seat in sorted(equals.values(), key=lambda by_seat: len(by_seat) > 1):
            positions = sorted(chain.from_iterable(by_seat.values()))
            emptiest = [(on_seat(seat), own[0], seat) for seat, own in by_seat.items()]
            heapify(emptiest)
            for old in sorted(positions, key=lambda p: (-weights[p], p)):
                # Tokens are only ever added, so an outdated entry is too low: renew it.
                while emptiest[0][0] < (now := on_seat(emptiest[0][2])):
                    heapreplace(emptiest, (now, *emptiest[0][1:]))
                _, _, seat = heappop(emptiest)
                free = by_seat[seat]
                dealt[free.pop(0)] = old
                for index in seat:
                    expected[index] += int(weights[old])
                if free:
                    heappush(emptiest, (on_seat(seat), free[0], seat))
        self.experts = [experts[old] for old in dealt]
        self._loads = [loads[old] for old in dealt]
        self._weights = weights[dealt]
