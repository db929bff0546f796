"""Plans of all layers for nodes that differ in how likely they fail."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_resilient.algorithms import node_sets, topology_fit
from megatron_resilient.algorithms.layer_plan import LayerPlan
from megatron_resilient.algorithms.loss_tables import LossTable, ProbabilityMeasure
from megatron_resilient.algorithms.placement_search import search_placement
from megatron_resilient.algorithms.topology import AllLost, Topology

# Clusters are searched to the end up to this size: no nodes are alike, so there is more to search.
_MAX_SEARCHED_NODES = 8


def fit_layers(
    layers: Sequence[LayerPlan], topology: Topology, effort: int, seed: int, *, search: bool
) -> None:
    """Chooses nodes that fit the topology, and in small clusters better holders as well.

    Args:
        layers: The plans, in one order of the nodes; they are seated on other nodes.
        topology: Simplified.
        effort: Sets of nodes to weigh.
        seed: Of the local search.
        search: Whether holders may be chosen anew.
    """
    fatal = node_sets.minimal(own for layer in layers for own in layer.holders)
    fit = topology_fit.fit_to_topology(fatal, topology, seed=seed)
    for layer in layers:
        layer.seat(
            [
                node_sets.from_members(fit.node_of[position] for position in node_sets.members(own))
                for own in layer.parts
            ]
        )
        layer.method = f"{layer.method}; {fit.method}"
        layer.optimal = None
    if search and topology.nodes <= _MAX_SEARCHED_NODES:
        _Search(layers, topology, effort).run()
    for layer in layers:
        fatal = node_sets.minimal(layer.holders)
        if len(fatal) == 1:
            bound = topology_fit.survival_bound(
                layer.replicas[0], len(layer.replicas), layer.slots_per_node, topology
            )
            lost = AllLost(topology)(node_sets.members(fatal[0]))
            if 1 - lost >= bound - 1e-12:
                layer.optimal = True


@dataclass(frozen=True)
class _Alone:
    """The best that is known of a layer by itself.

    Attributes:
        holders: Nodes that hold each expert.
        cost: Probability that the layer is lost, in the measure's unit.
        proven: Whether nothing is better.
    """

    holders: tuple[int, ...]
    cost: float
    proven: bool


class _Search:
    """Looks for holders of all layers that make the joint survival likelier."""

    def __init__(self, layers: Sequence[LayerPlan], topology: Topology, effort: int) -> None:
        self._layers = layers
        self._effort = effort
        self._table = LossTable(topology.nodes)
        self._measure = ProbabilityMeasure(topology)
        self._kinds = list(zip(topology.failure_probability, topology.rack_of, strict=True))

    def run(self) -> None:
        """Improves one layer after another, until no layer can be improved by itself."""
        alone = [self._best_alone(layer) for layer in self._layers]
        together = self._fatal(own for layer in self._layers for own in layer.holders)
        if self._cost(own for best in alone for own in best.holders) < self._measure(together):
            for layer, best in zip(self._layers, alone, strict=True):
                self._hold(layer, best.holders)
        improved = len(self._layers) > 1
        while improved and self._effort > 0:
            improved = sum(map(self._improve, self._layers)) > 0  # every layer gets its turn
        for layer, best in zip(self._layers, alone, strict=True):
            rest = self._rest(layer)
            joint = self._measure(rest | self._fatal(layer.holders))
            if self._measure(rest | self._fatal(best.holders)) <= joint:
                self._hold(layer, best.holders)  # its own best, which costs the others nothing
            if best.cost < self._measure.limit(self._cost(layer.holders)):
                layer.optimal = False
            elif best.proven:
                layer.optimal = True

    def _best_alone(self, layer: LayerPlan) -> _Alone:
        found, proven = self._find(layer, 0, alike=True)
        holders = found or layer.holders
        return _Alone(holders, self._cost(holders), proven)

    def _improve(self, layer: LayerPlan) -> bool:
        # What is fatal to the other layers tells nodes apart that fail alike.
        found, _ = self._find(layer, self._rest(layer), alike=False)
        if found:
            self._hold(layer, found)
        return found is not None

    def _find(
        self, layer: LayerPlan, rest: int, *, alike: bool
    ) -> tuple[tuple[int, ...] | None, bool]:
        """Returns better holders if there are any, and whether all were searched."""
        result = search_placement(
            layer.replicas,
            layer.slots_per_node,
            self._table,
            self._measure,
            min_distinct=layer.min_distinct,
            kinds=self._kinds if alike else range(self._table.nodes),
            known_cost=self._measure(rest | self._fatal(layer.holders)),
            already_fatal=rest,
            budget=max(self._effort, 0),
        )
        self._effort -= result.effort
        return result.holders, result.complete

    def _rest(self, layer: LayerPlan) -> int:
        """Returns the losses that are fatal to some other layer."""
        return self._fatal(
            own for other in self._layers if other is not layer for own in other.holders
        )

    def _fatal(self, holders: Iterable[int]) -> int:
        return self._table.fatal(holders)

    def _cost(self, holders: Iterable[int]) -> float:
        return self._measure(self._fatal(holders))

    @staticmethod
    def _hold(layer: LayerPlan, holders: tuple[int, ...]) -> None:
        if holders != layer.holders:
            layer.hold(holders, "search")
