"""Exact sums over all ways to lose nodes, by one sweep over the nodes.

The sweep walks over the nodes and remembers, for every fatal set, only whether all of its nodes
met so far are lost. Nodes that lie in the same fatal sets are met together, and parts of the
cluster that share no fatal set are swept apart. For the plans of this package few sets are open at
a time, so that the sweep is exact and fast where enumeration would never end: disjoint blocks
(their closed form falls out), blocks cut at other places in every layer, nested sets. Where too
many sets are open it gives up, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Protocol

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.loss_polynomials import LossPolynomials
from megatron_resilient.algorithms.topology import AllLost, Topology

DEFAULT_STATE_LIMIT = 20_000

# Sets less likely to be lost are left aside, branches less likely are not followed, and where there
# are too many branches the least likely ones are not; together they may weigh `MAX_ERROR`.
NEGLIGIBLE_SET = 1e-14
NEGLIGIBLE_BRANCH = 1e-18
MAX_ERROR = 1e-6


class _Law[Weight: (int, float)](Protocol):
    """How the weight of a branch changes when nodes are all lost, or at least one is kept."""

    negligible: Weight

    def all_lost(self, weight: Weight, nodes: Sequence[int]) -> Weight: ...

    def some_kept(self, weight: Weight, nodes: Sequence[int]) -> Weight: ...


@dataclass(frozen=True)
class _Atom:
    """Nodes that lie in the same fatal sets."""

    nodes: tuple[int, ...]
    fatal: int  # the fatal sets they lie in: bit i stands for set i
    closes: int  # those of them that have no node further on


class _Counting:
    """Counts, by the number of lost nodes."""

    negligible = 0

    def __init__(self, polynomials: LossPolynomials) -> None:
        self._of = polynomials

    def all_lost(self, weight: int, nodes: Sequence[int]) -> int:
        return self._of.times(weight, self._of.all_lost(len(nodes)))

    def some_kept(self, weight: int, nodes: Sequence[int]) -> int:
        return self._of.times(weight, self._of.some_kept(len(nodes)))


class _Probability:
    """Probabilities, when every node fails by itself."""

    negligible = NEGLIGIBLE_BRANCH

    def __init__(self, failure_probability: Sequence[float]) -> None:
        self._failure = failure_probability

    def all_lost(self, weight: float, nodes: Sequence[int]) -> float:
        return weight * prod(self._failure[node] for node in nodes)

    def some_kept(self, weight: float, nodes: Sequence[int]) -> float:
        return weight * (1.0 - prod(self._failure[node] for node in nodes))


def count_survivable(
    fatal_sets: Sequence[int],
    nodes: int,
    max_losses: int,
    state_limit: int = DEFAULT_STATE_LIMIT,
) -> list[int] | None:
    """Counts the sets of k lost nodes that contain no fatal set, for k = 0 .. `max_losses`.

    Args:
        fatal_sets: Minimal sets of nodes (see `node_sets`).
        nodes: Number of nodes.
        max_losses: Largest number of nodes lost together.
        state_limit: Most branches to follow at a time.

    Returns:
        The counts, exact; None when `state_limit` would be passed.
    """
    if 0 in fatal_sets:  # an expert that nobody holds
        return [0] * (max_losses + 1)
    of = LossPolynomials(nodes, max_losses)
    law = _Counting(of)
    survivable = 1
    free = nodes
    for part in _connected([s for s in fatal_sets if s.bit_count() <= max_losses], []):
        (atoms,) = _atoms(part, [sorted(set(chain.from_iterable(map(node_sets.members, part))))])
        states, _ = _sweep(atoms, {(1 << len(part)) - 1: 1}, law, state_limit)
        if states is None:
            return None
        survivable = of.times(survivable, sum(states.values()))
        free -= sum(len(atom.nodes) for atom in atoms)
    return of.coefficients(of.times(survivable, of.anything(free)))


def survival_probability(
    fatal_sets: Sequence[int], topology: Topology, state_limit: int = DEFAULT_STATE_LIMIT
) -> tuple[float, float] | None:
    """Returns the probability that no fatal set is lost, and by how much it may be off.

    Left out are branches too unlikely to be followed and sets too unlikely to be lost; their weight
    is the error, on top of which comes rounding.

    Args:
        fatal_sets: Minimal sets of nodes (see `node_sets`).
        topology: Failure probabilities of nodes and racks.
        state_limit: Most branches to follow at a time.

    Returns:
        (probability, error), or None when `state_limit` would be passed by more than `MAX_ERROR`.
    """
    if 0 in fatal_sets:  # an expert that nobody holds
        return 0.0, 0.0
    topology = topology.simplified()
    domains = topology.domains()
    shared = [node_sets.from_members(d.nodes) for d in domains if len(d.nodes) > 1]
    law = _Probability(topology.failure_probability)
    in_failed_domain = _Probability((1.0,) * topology.nodes)

    all_lost = AllLost(topology)
    lost = {own: all_lost(node_sets.members(own)) for own in fatal_sets}
    likely = [own for own, probability in lost.items() if probability > NEGLIGIBLE_SET]
    survival, missing = 1.0, sum(p for p in lost.values() if p <= NEGLIGIBLE_SET)
    for part in _connected(likely, shared):
        states: dict[int, float] | None = {(1 << len(part)) - 1: 1.0}
        atoms_by_domain = _atoms(part, [domain.nodes for domain in domains])
        for domain, atoms in zip(domains, atoms_by_domain, strict=True):
            if states is None or not atoms:
                continue
            down = domain.failure_probability
            up_states = {state: weight * (1 - down) for state, weight in states.items()}
            down_states = {state: weight * down for state, weight in states.items()}
            states, dropped = _sweep(atoms, up_states, law, state_limit)
            missing += dropped
            if down and states is not None:
                rest, dropped = _sweep(atoms, down_states, in_failed_domain, state_limit)
                missing += dropped
                for state, weight in (rest or {}).items():
                    states[state] = states.get(state, 0.0) + weight
        if states is None or missing > MAX_ERROR:
            return None
        survival *= sum(states.values())
    return survival, missing


def _sweep[Weight: (int, float)](
    atoms: Sequence[_Atom], states: dict[int, Weight], law: _Law[Weight], state_limit: int
) -> tuple[dict[int, Weight] | None, Weight]:
    """Meets the atoms one after another.

    A state has bit i set while every node of fatal set i met so far is lost. Branches that lose a
    whole fatal set are left out: what remains is what survives.

    Returns:
        Weight of every state (None when there are too many of them), and the weight of the
        branches that were dropped as negligible.
    """
    dropped: Weight = law.negligible - law.negligible
    for atom in atoms:
        after: dict[int, Weight] = {}
        for state, weight in states.items():
            branches = [(state & ~atom.fatal, law.some_kept(weight, atom.nodes))]
            if not atom.closes & state:
                branches.append((state, law.all_lost(weight, atom.nodes)))
            for branch, branch_weight in branches:
                if branch_weight <= law.negligible:
                    dropped += branch_weight
                else:
                    after[branch] = after.get(branch, 0) + branch_weight
        states = after
        if len(states) > state_limit:
            if not law.negligible:  # exact or not at all
                return None, dropped
            lightest = sorted(states, key=states.__getitem__)[: len(states) - state_limit // 2]
            dropped += sum(states.pop(state) for state in lightest)
            if dropped > MAX_ERROR:
                return None, dropped
    return states, dropped


def _connected(fatal_sets: Sequence[int], ties: Sequence[int]) -> list[list[int]]:
    """Splits the sets into parts that share no node, not even through a tie (a rack)."""
    leader = list(range(len(fatal_sets) + len(ties)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    first_at: dict[int, int] = {}
    for index, nodes in enumerate([*fatal_sets, *ties]):
        for node in node_sets.members(nodes):
            leader[find(index)] = find(first_at.setdefault(node, index))
    parts: dict[int, list[int]] = {}
    for index, own in enumerate(fatal_sets):
        parts.setdefault(find(index), []).append(own)
    return list(parts.values())


def _atoms(fatal_sets: Sequence[int], domains: Sequence[Sequence[int]]) -> list[list[_Atom]]:
    """Groups the nodes of every domain by the fatal sets they lie in; nodes in none are left out.

    Returns:
        The atoms of every domain, in the order in which they are to be met.
    """
    fatal_of: dict[int, int] = {}
    for index, fatal in enumerate(fatal_sets):
        for node in node_sets.members(fatal):
            fatal_of[node] = fatal_of.get(node, 0) | 1 << index
    groups: list[dict[int, list[int]]] = []
    for domain in domains:
        group: dict[int, list[int]] = {}
        for node in domain:
            if node in fatal_of:
                group.setdefault(fatal_of[node], []).append(node)
        groups.append(group)
    atoms: list[list[_Atom]] = []
    met_later = 0
    for group in reversed(groups):
        own = []
        for fatal, nodes in reversed(group.items()):
            own.append(_Atom(tuple(nodes), fatal, fatal & ~met_later))
            met_later |= fatal
        atoms.append(own[::-1])
    return atoms[::-1]
