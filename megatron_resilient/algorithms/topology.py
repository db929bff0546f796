"""What the cluster is like: nodes with failure probabilities, in racks that fail as a whole."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_resilient.errors import PlanError

NO_RACK = -1


@dataclass(frozen=True)
class FailureDomain:
    """Nodes that may fail together: those of a rack, or one node by itself.

    Attributes:
        nodes: The nodes, ascending.
        failure_probability: That all of them fail at once, beside what each does by itself.
    """

    nodes: tuple[int, ...]
    failure_probability: float


@dataclass(frozen=True)
class Topology:
    """Nodes and racks that fail independently of each other; a failed rack takes its nodes along.

    Attributes:
        failure_probability: Of every node by itself, while its rack is up.
        rack_of: Index of every node's rack, or `NO_RACK`.
        rack_failure_probability: Of every rack.
    """

    failure_probability: tuple[float, ...]
    rack_of: tuple[int, ...]
    rack_failure_probability: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.failure_probability) != len(self.rack_of):
            raise PlanError(
                f"{len(self.failure_probability)} failure probabilities "
                f"for {len(self.rack_of)} nodes"
            )
        for kind, values in (
            ("node", self.failure_probability),
            ("rack", self.rack_failure_probability),
        ):
            for index, value in enumerate(values):
                if not (math.isfinite(value) and 0 <= value <= 1):
                    raise PlanError(
                        f"failure probability of {kind} {index} is {value}: it must be in [0, 1]"
                    )
        for node, rack in enumerate(self.rack_of):
            if rack != NO_RACK and not 0 <= rack < len(self.rack_failure_probability):
                raise PlanError(f"node {node} is in rack {rack}, which is not described")

    @classmethod
    def independent(cls, failure_probability: Sequence[float]) -> "Topology":
        """Nodes that share nothing."""
        return cls(tuple(failure_probability), (NO_RACK,) * len(failure_probability))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.rack_of)

    def simplified(self) -> "Topology":
        """Returns the same law of failures with only those racks that make nodes fail together.

        A rack that never fails is no rack, and one that holds a single node makes that node a
        little worse. The racks left over are numbered by their first node.
        """
        population = Counter(self.rack_of)
        probability: list[float] = []
        racks: dict[int, int] = {}
        rack_of: list[int] = []
        for own, rack in zip(self.failure_probability, self.rack_of, strict=True):
            shared = 0.0 if rack == NO_RACK else self.rack_failure_probability[rack]
            if shared and population[rack] > 1:
                probability.append(own)
                rack_of.append(racks.setdefault(rack, len(racks)))
            else:
                probability.append(shared + (1 - shared) * own)
                rack_of.append(NO_RACK)
        return Topology(
            tuple(probability),
            tuple(rack_of),
            tuple(self.rack_failure_probability[rack] for rack in racks),
        )

    def domains(self) -> list[FailureDomain]:
        """Returns what fails independently, in the order of first nodes."""
        members: dict[tuple[bool, int], list[int]] = {}
        for node, rack in enumerate(self.rack_of):
            members.setdefault((False, node) if rack == NO_RACK else (True, rack), []).append(node)
        return [
            FailureDomain(tuple(nodes), self.rack_failure_probability[rack] if shared else 0.0)
            for (shared, rack), nodes in members.items()
        ]

    @property
    def is_uniform(self) -> bool:
        """Whether nodes fail independently and with one probability."""
        simple = self.simplified()
        return not simple.rack_failure_probability and len(set(simple.failure_probability)) <= 1


class AllLost:
    """The probability that some nodes are all lost, for many sets of nodes of one topology."""

    def __init__(self, topology: Topology) -> None:
        self._node_failure = topology.failure_probability
        self.domain_of = [0] * topology.nodes
        self._domain_failure = []
        for index, domain in enumerate(topology.domains()):
            self._domain_failure.append(domain.failure_probability)
            for node in domain.nodes:
                self.domain_of[node] = index

    def __call__(self, nodes: Iterable[int]) -> float:
        """Returns the probability; 1 for no nodes."""
        by_itself: dict[int, float] = {}
        for node in nodes:
            domain = self.domain_of[node]
            by_itself[domain] = by_itself.get(domain, 1.0) * self._node_failure[node]
        probability = 1.0
        for domain, own in by_itself.items():
            probability *= self._domain_failure[domain] + (1 - self._domain_failure[domain]) * own
        return probability
