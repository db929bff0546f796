import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.recovery_probability import survival_probability
from megatron_resilient.algorithms.topology import NO_RACK, AllLost, Topology
from megatron_resilient.algorithms.topology_fit import (
    fit_to_topology,
    probability_of_alive,
    safest_nodes,
    survival_bound,
)
from tests.support import planning_oracles as oracles


@st.composite
def topologies(draw, max_nodes=7, max_racks=3):
    nodes = draw(st.integers(1, max_nodes))
    racks = draw(st.integers(0, max_racks))
    probability = st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0])
    return Topology(
        tuple(draw(st.lists(probability, min_size=nodes, max_size=nodes))),
        tuple(draw(st.lists(st.integers(NO_RACK, racks - 1), min_size=nodes, max_size=nodes))),
        tuple(draw(st.lists(probability, min_size=racks, max_size=racks))),
    )


def loss_of(topology):
    return oracles.loss_probability(
        topology.failure_probability, topology.rack_of, topology.rack_failure_probability
    )


@given(topologies(), st.data())
def test_safest_nodes_are_the_least_likely_to_be_all_lost(topology, data):
    count = data.draw(st.integers(1, topology.nodes))
    all_lost = AllLost(topology)
    best = min(map(all_lost, itertools.combinations(range(topology.nodes), count)))
    chosen = safest_nodes(topology, count)
    assert len(set(chosen)) == count
    assert all_lost(chosen) == pytest.approx(best, rel=1e-9)
    loss = loss_of(topology)
    own = node_sets.from_members(chosen)
    assert all_lost(chosen) == pytest.approx(
        sum(p for lost, p in enumerate(loss) if lost & own == own), abs=1e-12
    )


@given(topologies(), st.integers(0, 7))
def test_probability_of_nodes_alive(topology, at_least):
    expected = sum(
        p
        for lost, p in enumerate(loss_of(topology))
        if topology.nodes - lost.bit_count() >= at_least
    )
    assert probability_of_alive(topology, at_least) == pytest.approx(expected, abs=1e-12)


def relabelled(fatal_sets, node_of):
    return [
        node_sets.from_members(node_of[position] for position in node_sets.members(own))
        for own in fatal_sets
    ]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_blocks_of_independent_nodes_are_divided_as_well_as_possible(sizes, data):
    nodes = sum(sizes) + data.draw(st.integers(0, 6 - min(sum(sizes), 6)))
    failure = data.draw(st.lists(st.sampled_from([0.01, 0.1, 0.4]), min_size=nodes, max_size=nodes))
    topology = Topology.independent(failure)
    starts = itertools.accumulate(sizes, initial=0)
    blocks = [
        node_sets.from_members(range(start, start + size))
        for start, size in zip(starts, sizes, strict=False)
    ]
    fit = fit_to_topology(blocks, topology)
    assert sorted(fit.node_of) == list(range(nodes))
    reached = survival_probability(relabelled(blocks, fit.node_of), topology).value
    if nodes <= 6:
        best = max(
            survival_probability(relabelled(blocks, order), topology).value
            for order in itertools.permutations(range(nodes))
        )
        assert reached == pytest.approx(best, abs=1e-12)


def test_exchanging_nodes_spreads_blocks_over_racks():
    """Six blocks of two nodes, first within racks: afterwards no rack takes a block along."""
    topology = Topology((0.01,) * 12, tuple(node // 4 for node in range(12)), (0.1,) * 3)
    blocks = [0b11 << 2 * block for block in range(6)]
    fit = fit_to_topology(blocks, topology, seed=1)
    assert fit.method == "node exchange"
    for own in relabelled(blocks, fit.node_of):
        assert len({topology.rack_of[node] for node in node_sets.members(own)}) == 2
    assert fit == fit_to_topology(blocks, topology, seed=1)


def test_no_plan_survives_more_than_the_bound():
    rng = random.Random(4)
    instances = [own for own in oracles.small_instances(4, 2, 5) if own[1] > 1]
    for replicas, nodes, slots in rng.sample(instances, 25):
        topology = Topology(
            tuple(rng.choice([0.01, 0.1, 0.3]) for _ in range(nodes)),
            tuple(rng.randint(NO_RACK, 1) for _ in range(nodes)),
            (0.05, 0.2),
        )
        best = oracles.best_survival(replicas, nodes, slots, loss_of(topology))
        bound = survival_bound(replicas[0], len(replicas), slots, topology.simplified())
        assert best <= bound + 1e-12
