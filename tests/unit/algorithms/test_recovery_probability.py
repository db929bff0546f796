import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.loss_tables import loss_probabilities
from megatron_resilient.algorithms.recovery_probability import (
    fatal_node_sets,
    grouped_recovery_probability,
    guaranteed_losses,
    recovery_probability,
    survival_probability,
)
from megatron_resilient.algorithms.topology import NO_RACK, Topology
from megatron_resilient.errors import PlanError
from tests.support import planning_oracles as oracles


@st.composite
def placements(draw):
    nodes, slots = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, nodes * slots))
    spare = draw(
        st.lists(
            st.integers(0, experts - 1),
            min_size=nodes * slots - experts,
            max_size=nodes * slots - experts,
        )
    )
    filled = draw(st.permutations([*range(experts), *spare]))
    return np.array(filled).reshape(nodes, slots), experts


@st.composite
def topologies(draw, nodes: int):
    probability = st.floats(0, 1)
    racks = draw(st.lists(probability, max_size=3))
    rack_of = draw(st.lists(st.integers(NO_RACK, len(racks) - 1), min_size=nodes, max_size=nodes))
    return Topology(
        tuple(draw(st.lists(probability, min_size=nodes, max_size=nodes))),
        tuple(rack_of),
        tuple(racks),
    )


@given(placements())
def test_exact_as_by_enumeration(placement):
    slots, experts = placement
    fatal = fatal_node_sets(slots, experts)
    got = recovery_probability(fatal, len(slots), range(len(slots) + 1))
    for losses, estimate in got.items():
        assert estimate.standard_error == 0
        assert estimate.value == oracles.recovery_by_enumeration(slots, experts, losses)
    survivable = [losses for losses, estimate in got.items() if estimate.value == 1]
    assert guaranteed_losses(fatal, len(slots)) == max(survivable)


@given(st.data())
def test_survival_as_by_enumeration(data):
    slots, experts = data.draw(placements())
    topology = data.draw(topologies(len(slots)))
    probability = oracles.loss_probability(
        topology.failure_probability, topology.rack_of, topology.rack_failure_probability
    )
    survivable = [
        not oracles.is_fatal(slots, experts, list(node_sets.members(lost)))
        for lost in range(1 << len(slots))
    ]
    fatal = fatal_node_sets(slots, experts)
    got = survival_probability(fatal, topology)
    assert got.value == pytest.approx(probability @ survivable, abs=1e-12)
    assert loss_probabilities(topology) == pytest.approx(probability, abs=1e-12)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 4), st.data())
def test_closed_form_of_grouped_plans(sizes, free, data):
    """Inclusion and exclusion over groups, as derived from section 4.1 of the paper."""
    nodes = sum(sizes) + free
    losses = data.draw(st.integers(0, nodes))
    alive = nodes - losses
    expected = sum(
        (-1) ** len(dead) * comb(nodes - sum(dead), alive)
        for count in range(len(sizes) + 1)
        for dead in itertools.combinations(sizes, count)
    ) / comb(nodes, alive)
    assert grouped_recovery_probability(sizes, nodes, losses) == pytest.approx(expected)
    starts = np.cumsum([0, *sizes])
    blocks = [node_sets.from_members(range(a, b)) for a, b in itertools.pairwise(starts)]
    assert recovery_probability(blocks, nodes, [losses])[losses].value == pytest.approx(expected)


def test_blocks_that_do_not_fit():
    with pytest.raises(PlanError, match="blocks of 6 nodes do not fit into 5"):
        grouped_recovery_probability([3, 3], 5, 1)


def test_nested_plans_of_figure_four():
    """Four experts on five nodes of which three are lost: 5/10 against 7/10 when nested."""
    apart = [{0, 1}, {0, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    nested = [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    for plan, expected in ((apart, 0.5), (nested, 0.7)):
        fatal = node_sets.minimal(map(node_sets.from_members, plan))
        assert recovery_probability(fatal, 5, [3])[3].value == expected


def test_grouped_plans_of_figure_five():
    """Two groups on five nodes of which three are lost: 4/10 fail, 7/10 if they overlap badly."""
    grouped = [{0, 1}, {0, 1}, {2, 3, 4}, {2, 3, 4}]
    crossed = [{0, 1}, {0, 2}, {1, 3, 4}, {2, 3, 4}]
    for plan, expected in ((grouped, 0.6), (crossed, 0.3)):
        fatal = node_sets.minimal(map(node_sets.from_members, plan))
        assert recovery_probability(fatal, 5, [3])[3].value == pytest.approx(expected)


def _blocks_of_many_layers(nodes: int, layers: int) -> list[int]:
    rng = np.random.default_rng(5)
    sets = []
    for _ in range(layers):
        start = 0
        while start < nodes:
            size = int(rng.integers(2, 6))
            if start + size <= nodes:
                sets.append(node_sets.from_members(range(start, start + size)))
            start += size
    return node_sets.minimal(sets)


def test_a_thousand_nodes_exactly_and_by_sampling():
    fatal = _blocks_of_many_layers(1000, 40)
    exact = recovery_probability(fatal, 1000, [2, 30])
    sampled = recovery_probability(fatal, 1000, [2, 30], state_limit=0, samples=4000)
    for losses in (2, 30):
        assert exact[losses].standard_error == 0
        error = sampled[losses].standard_error
        assert 0 < error < 0.02
        assert abs(sampled[losses].value - exact[losses].value) < 4 * error
    # Two lost nodes are fatal exactly if they are one of the sets of two.
    pairs = sum(own.bit_count() == 2 for own in fatal)
    assert exact[2].value == pytest.approx(1 - pairs / comb(1000, 2), abs=1e-15)


def test_sampled_survival_agrees_with_the_exact_one():
    fatal = _blocks_of_many_layers(60, 4)
    topology = Topology((0.1,) * 60, tuple(node // 6 for node in range(60)), (0.05,) * 10)
    exact = survival_probability(fatal, topology)
    sampled = survival_probability(fatal, topology, state_limit=0)
    assert exact.standard_error < 1e-9 < sampled.standard_error
    assert abs(sampled.value - exact.value) < 4 * sampled.standard_error


def test_sampling_is_seeded():
    fatal = _blocks_of_many_layers(50, 3)
    one, same, other = (
        recovery_probability(fatal, 50, [9], state_limit=0, samples=500, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_an_expert_that_nobody_holds():
    assert recovery_probability([0], 3, [0, 1])[0].value == 0
    assert survival_probability([0], Topology.independent([0.1] * 3)).value == 0
    assert guaranteed_losses([0], 3) == -1


def test_impossible_numbers_of_losses():
    with pytest.raises(PlanError, match=r"losses must be in 0 \.\. 3"):
        recovery_probability([1], 3, [4])


@given(st.lists(st.integers(0, 255), max_size=12))
def test_minimal_sets(sets):
    kept = node_sets.minimal(sets)
    assert set(kept) <= set(sets)
    for own in sets:
        assert any(small & own == small for small in kept)
    for one, other in itertools.permutations(kept, 2):
        assert one & other != one
    assert node_sets.from_rows(node_sets.to_rows(sets, 8)) == sets if sets else True


@given(st.integers(1, 8).flatmap(topologies))
def test_a_simplified_topology_fails_alike(topology):
    simple = topology.simplified()
    assert simple.simplified() == simple
    for own in (topology, simple):
        assert oracles.loss_probability(
            own.failure_probability, own.rack_of, own.rack_failure_probability
        ) == pytest.approx(loss_probabilities(topology), abs=1e-12)


def test_impossible_topologies():
    with pytest.raises(PlanError, match=r"failure probability of node 1 is 1\.5"):
        Topology.independent([0.1, 1.5])
    with pytest.raises(PlanError, match="node 0 is in rack 2"):
        Topology((0.1,), (2,), (0.1,))
    with pytest.raises(PlanError, match="2 failure probabilities for 1 nodes"):
        Topology((0.1, 0.2), (NO_RACK,))
