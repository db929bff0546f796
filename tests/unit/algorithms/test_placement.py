import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from megatron_resilient.algorithms import node_sets
from megatron_resilient.algorithms.block_design import is_block_optimal
from megatron_resilient.algorithms.placement import place_replicas
from megatron_resilient.algorithms.planner import make_plan, value_plan
from megatron_resilient.algorithms.recovery_probability import (
    fatal_node_sets,
    holders,
    recovery_probability,
    survival_probability,
)
from megatron_resilient.algorithms.replication import allocate_replicas
from megatron_resilient.algorithms.topology import NO_RACK, Topology
from megatron_resilient.errors import PlanError
from tests.support import planning_oracles as oracles


def survivable(slots, experts):
    """Returns the recovery probability for every number of lost nodes."""
    nodes = len(slots)
    got = recovery_probability(fatal_node_sets(slots, experts), nodes, range(nodes + 1))
    return [got[losses].value for losses in range(nodes + 1)]


def replica_counts(draw, nodes, slots, max_experts):
    """Draws counts from loads, or any counts at all."""
    experts = draw(st.integers(1, min(max_experts, nodes * slots)))
    if draw(st.booleans()):
        loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
        allocation = allocate_replicas(loads, nodes * slots, draw(st.integers(1, 3)))
        return list(allocation.replicas), allocation.effective_min_replicas
    cuts = draw(
        st.lists(
            st.integers(1, nodes * slots - 1),
            unique=True,
            min_size=experts - 1,
            max_size=experts - 1,
        )
        if nodes * slots > 1
        else st.just([])
    )
    edges = [0, *sorted(cuts), nodes * slots]
    return [b - a for a, b in itertools.pairwise(edges)], 1


@st.composite
def instances(draw, max_nodes=14, max_slots=6, max_experts=16):
    nodes, slots = draw(st.integers(1, max_nodes)), draw(st.integers(1, max_slots))
    replicas, minimum = replica_counts(draw, nodes, slots, max_experts)
    return replicas, nodes, slots, minimum


def small_sample():
    """All instances of up to four nodes, and some of five and six."""
    tiny = list(oracles.small_instances(4, 3, 6))
    larger = list(oracles.small_instances(6, 3, 6, min_nodes=5))
    # The hard ones are those that rank overlap does not solve.
    hard = [own for own in larger if not is_block_optimal(*own)]
    # Those with many even experts have too many plans to enumerate here.
    rng = random.Random(7)
    some = rng.sample([own for own in hard if len(own[0]) <= 4], 12) + rng.sample(larger, 12)
    return tiny + [own for own in some if own[1] * own[2] <= 15 or len(own[0]) <= 4]


def test_best_for_every_number_of_losses_on_small_instances():
    """One plan is the best for every number of losses at once, and is known to be."""
    rng = random.Random(1)
    for replicas, nodes, slots in small_sample():
        shuffled = rng.sample(replicas, len(replicas))
        placement = place_replicas([shuffled], nodes, slots, min_replicas=min(replicas))
        fatal = recovery_probability(
            fatal_node_sets(placement.slots[0], len(replicas)), nodes, range(nodes + 1)
        )
        best = oracles.fewest_fatal_losses(replicas, nodes, slots)
        total = [sum(1 for lost in range(1 << nodes) if lost.bit_count() == k) for k in fatal]
        got = [round((1 - own.value) * n) for own, n in zip(fatal.values(), total, strict=True)]
        assert got == best, (replicas, nodes, slots)
        assert placement.optimal == (True,), (replicas, nodes, slots)


def random_topology(rng, nodes):
    racks = rng.randint(0, 3)
    return Topology(
        tuple(rng.choice([0.001, 0.01, 0.05, 0.1, 0.3]) for _ in range(nodes)),
        tuple(rng.randint(NO_RACK, racks - 1) for _ in range(nodes)),
        tuple(rng.choice([0.0, 0.02, 0.2]) for _ in range(racks)),
    )


def test_best_survival_on_small_instances():
    rng = random.Random(3)
    instances = list(oracles.small_instances(5, 3, 6, min_nodes=2))
    instances = [own for own in instances if own[1] * own[2] <= 12 or len(own[0]) <= 3]
    for replicas, nodes, slots in rng.sample(instances, 60):
        topology = random_topology(rng, nodes)
        placement = place_replicas(
            [list(replicas)], nodes, slots, min_replicas=min(replicas), topology=topology
        )
        got = survival_probability(fatal_node_sets(placement.slots[0], len(replicas)), topology)
        best = oracles.best_survival(
            replicas,
            nodes,
            slots,
            oracles.loss_probability(
                topology.failure_probability, topology.rack_of, topology.rack_failure_probability
            ),
        )
        case = (replicas, nodes, slots, topology)
        assert got.value == pytest.approx(best, abs=1e-9), case
        assert placement.optimal == (True,), case


@settings(max_examples=150)
@given(instances())
def test_valid_and_never_worse_than_rank_overlap(instance):
    replicas, nodes, slots, minimum = instance
    placement = place_replicas([replicas], nodes, slots, min_replicas=minimum, effort=1000)
    got = placement.slots[0]
    assert got.shape == (nodes, slots)
    assert np.bincount(got.ravel(), minlength=len(replicas)).tolist() == replicas
    distinct = holders(got, len(replicas)).sum(axis=1)
    assert (distinct >= [min(count, minimum, nodes) for count in replicas]).all()
    order = sorted(range(len(replicas)), key=lambda e: replicas[e])
    paper = oracles.rank_overlap([replicas[e] for e in order], nodes, slots)
    ours, theirs = survivable(got, len(replicas)), survivable(paper, len(replicas))
    assert all(a >= b - 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("replicas", "nodes", "slots"),
    [
        ((2, 2, 2), 3, 2),  # one loss is fatal to rank overlap, although all have two replicas
        ((4, 4, 5, 7, 10, 11, 11, 20), 12, 6),
        ((6,) * 11, 11, 6),
        ((21,) * 64 + (22,) * 32, 32, 64),
    ],
)
def test_better_where_rank_overlap_is_truncated(replicas, nodes, slots):
    placement = place_replicas([replicas], nodes, slots, min_replicas=replicas[0])
    ours = survivable(placement.slots[0], len(replicas))
    theirs = survivable(oracles.rank_overlap(replicas, nodes, slots), len(replicas))
    assert all(a >= b for a, b in zip(ours, theirs, strict=True))
    assert any(a > b + 1e-9 for a, b in zip(ours, theirs, strict=True))
    assert all(own == 1 for own in ours[: min(replicas[0], nodes)])


@settings(max_examples=60)
@given(instances(max_nodes=6, max_slots=4, max_experts=8), st.integers(1, 6))
def test_distinct_nodes_whenever_that_is_possible_at_all(instance, wanted):
    """An integer program decides whether min(r_e, wanted, N) distinct nodes are possible."""
    replicas, nodes, slots, _ = instance
    experts = len(replicas)
    minimum = [min(count, wanted, nodes) for count in replicas]
    size = experts * nodes  # copies on each node, then whether there are any
    rows, low, high = [], [], []

    def constrain(coefficients, least, most):
        row = np.zeros(2 * size)
        for index, value in coefficients:
            row[index] = value
        rows.append(row)
        low.append(least)
        high.append(most)

    for expert in range(experts):
        own = range(expert * nodes, (expert + 1) * nodes)
        constrain([(i, 1) for i in own], replicas[expert], replicas[expert])
        constrain([(size + i, 1) for i in own], minimum[expert], nodes)
        for i in own:
            constrain([(i, 1), (size + i, -1)], 0, np.inf)
    for node in range(nodes):
        constrain([(e * nodes + node, 1) for e in range(experts)], slots, slots)
    upper = np.concatenate([np.full(size, slots), np.ones(size)])
    possible = milp(
        np.zeros(2 * size),
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(np.zeros(2 * size), upper),
        integrality=np.ones(2 * size),
    ).success
    placement = place_replicas([replicas], nodes, slots, min_replicas=wanted, effort=500)
    reached = (holders(placement.slots[0], experts).sum(axis=1) >= minimum).all()
    assert reached == possible
    assert possible  # dealing replicas in turn shows that it always is


def layer_loads(rng, layers, experts, kind):
    drawn = {
        "pareto": lambda: rng.pareto(1, (layers, experts)) + 1,
        "gamma": lambda: rng.gamma(1, 1, (layers, experts)) + 0.01,
        "mild": lambda: 1 + 0.3 * rng.random((layers, experts)),
    }[kind]()
    return (drawn * 1e5).astype(int).tolist()


@pytest.mark.parametrize("kind", ["pareto", "gamma", "mild"])
@pytest.mark.parametrize(
    ("nodes", "slots", "experts"), [(10, 6, 8), (10, 6, 12), (10, 6, 16), (6, 3, 4), (20, 8, 12)]
)
def test_layers_together_are_not_below_the_papers_plan_in_one_order(nodes, slots, experts, kind):
    """The paper's models on its cluster, and others; 12 layers, for every number of losses."""
    rng = np.random.default_rng(nodes * experts)
    loads = layer_loads(rng, 12, experts, kind)
    plan = make_plan(loads, nodes, slots, min_replicas=2, effort=2000)
    value = value_plan(plan, loads)
    paper = set()
    for allocation in plan.allocations:
        own = oracles.rank_overlap(sorted(allocation.replicas), nodes, slots)
        paper.update(fatal_node_sets(own, experts))
    theirs = recovery_probability(node_sets.minimal(paper), nodes, value.joint_recovery)
    for losses, ours in value.joint_recovery.items():
        assert ours.value >= theirs[losses].value - 1e-12
        # No order of the nodes can be better than the worst layer.
        assert ours.value <= min(own.recovery[losses].value for own in value.layers) + 1e-12
    assert value.guaranteed_losses == min(min(own.distinct_nodes) for own in value.layers) - 1


def test_layers_share_their_fatal_sets():
    """Blocks of two, three and four nodes in every layer, whatever else differs."""
    replicas = [[2, 2, 3, 3, 4, 4], [4, 2, 4, 2, 3, 3], [2, 2, 2, 2, 5, 5]]
    placement = place_replicas(replicas, 9, 2, min_replicas=2)
    fatal = [fatal_node_sets(own, 6) for own in placement.slots]
    assert sorted(own.bit_count() for own in fatal[0]) == [2, 3, 4]
    joint = node_sets.minimal(set().union(*fatal))
    # The i-th smallest blocks have 2, 2 and 4 nodes at least, and no more sets are fatal.
    assert sorted(own.bit_count() for own in joint) == [2, 2, 4]


def test_same_arguments_same_placement():
    rng = np.random.default_rng(2)
    loads = layer_loads(rng, 3, 7, "gamma")
    topology = random_topology(random.Random(5), 9)
    one, same = (
        make_plan(loads, 9, 4, min_replicas=2, topology=topology).placement.slots for _ in range(2)
    )
    assert (one == same).all()


def test_a_topology_of_nodes_that_are_alike_changes_nothing():
    loads = layer_loads(np.random.default_rng(3), 4, 10, "gamma")
    plain = make_plan(loads, 8, 4, min_replicas=2).placement
    alike = [
        Topology.independent([0.05] * 8),
        Topology((0.0,) * 8, tuple(range(8)), (0.05,) * 8),
        Topology((0.05,) * 8, (0,) * 8, (0.0,)),
    ]
    for topology in alike:
        got = make_plan(loads, 8, 4, min_replicas=2, topology=topology).placement
        assert (got.slots == plain.slots).all()
        assert got.optimal == plain.optimal


@pytest.mark.parametrize("racked", [False, True])
def test_a_topology_is_made_use_of_in_large_clusters(racked):
    """Unreliable nodes and whole racks do not take an expert along if that can be helped."""
    nodes = 60
    failure = tuple(0.2 if node % 3 == 0 else 0.001 for node in range(nodes))
    rack_of = tuple(node // 10 if racked else NO_RACK for node in range(nodes))
    topology = Topology(failure, rack_of, (0.02,) * 6 if racked else ())
    loads = layer_loads(np.random.default_rng(4), 3, 40, "gamma")
    plain = make_plan(loads, nodes, 4, min_replicas=2)
    fitted = make_plan(loads, nodes, 4, min_replicas=2, topology=topology)
    before = value_plan(plain, loads, topology=topology)
    after = value_plan(fitted, loads, topology=topology)
    assert 1 - after.survival.value < 0.2 * (1 - before.survival.value)
    assert after.guaranteed_losses == before.guaranteed_losses


def test_unlike_nodes_and_several_layers():
    """Each layer may be better alone, but together nothing beats what is reached here."""
    rng = random.Random(8)
    for _ in range(10):
        topology = random_topology(rng, 6)
        loads = [[rng.randint(1, 50) for _ in range(5)] for _ in range(3)]
        plan = make_plan(loads, 6, 2, topology=topology)
        value = value_plan(plan, loads, topology=topology)
        plain = value_plan(make_plan(loads, 6, 2), loads, topology=topology)
        assert value.survival.value >= plain.survival.value - 1e-12
        for slots, optimal in zip(plan.placement.slots, plan.placement.optimal, strict=True):
            own = survival_probability(fatal_node_sets(slots, 5), topology)
            assert own.value >= value.survival.value - 1e-12
            assert optimal is not None


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_ranks_of_a_node(nodes, ranks, slots_per_rank, data):
    slots = ranks * slots_per_rank
    experts = data.draw(st.integers(1, nodes * slots))
    loads = data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts))
    plan = make_plan([loads], nodes, slots, ranks_per_node=ranks)
    whole = make_plan([loads], nodes, slots)
    by_rank = plan.placement.by_rank[0]
    assert by_rank.shape == (nodes * ranks, slots_per_rank)
    assert (np.diff(by_rank, axis=1) >= 0).all()
    # Ranks share out what the node has, whatever their number.
    assert (np.sort(plan.placement.slots[0], axis=1) == whole.placement.slots[0]).all()
    for node in range(nodes):
        own = by_rank[node * ranks : (node + 1) * ranks]
        for expert in np.unique(own):
            copies = (own == expert).sum(axis=1)
            if (own == expert).sum() > ranks:
                continue
            free = [len(set(row.tolist())) for row in own if expert not in row]
            # Twice on a rank only if every other rank has no slot to give but to what it needs.
            assert copies.max() == 1 or all(count == slots_per_rank for count in free)


def test_ranks_of_a_node_expect_even_tokens():
    placement = place_replicas([[1] * 8], 1, 8, loads=[[8, 7, 6, 5, 4, 3, 2, 1]], ranks_per_node=4)
    tokens = 8 - placement.by_rank[0]
    assert tokens.sum(axis=1).tolist() == [9, 9, 9, 9]


def test_balance_on_demand_costs_only_what_it_must():
    """One hot expert on four nodes: cold experts alone would leave two nodes idle."""
    loads = [7000, *[430] * 7]
    free = make_plan([loads], 4, 4)
    even = make_plan([loads], 4, 4, max_imbalance=1.05)
    kept = [value_plan(own, [loads]).joint_recovery[1].value for own in (free, even)]
    assert kept == [0.5, 0.25]
    assert free.placement.optimal == (True,)
    assert even.placement.optimal == (False,)
    assert "balance" in even.placement.methods[0]
    # Nothing is given up where the limit is kept anyway.
    lax = make_plan([loads], 4, 4, max_imbalance=1.5).placement
    assert (lax.slots == free.placement.slots).all()


def test_equally_replicated_experts_even_out_the_nodes():
    loads = [8, 7, 6, 5, 4, 3, 2, 1]
    placement = place_replicas([[2] * 8], 4, 4, min_replicas=2, loads=[loads])
    tokens = np.array(loads)[placement.slots[0]].sum(axis=1)
    assert tokens.max() == tokens.min() == 18


def test_extreme_shapes():
    one_node = place_replicas([[3, 5]], 1, 8, min_replicas=2)
    assert sorted(one_node.slots[0, 0].tolist()) == [0] * 3 + [1] * 5
    one_expert = place_replicas([[6]], 3, 2, min_replicas=2)
    assert (one_expert.slots == 0).all()
    assert one_expert.optimal == (True,)
    many_blocks = place_replicas([[1] * 1000, [1] * 998 + [2]], 500, 2)
    assert many_blocks.optimal == (True, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": []}, "no layers"),
        ({"replicas": [[1, 2]]}, "layer 0: 3 replicas for 2 \\* 2 slots"),
        ({"replicas": [[4, 0]]}, "layer 0: every expert needs at least one"),
        ({"nodes": 0}, "both must be at least 1"),
        ({"ranks_per_node": 3}, "cannot be shared evenly by 3 ranks"),
        ({"loads": [[1, 1], [1, 1]]}, "loads of 2 layers, replicas of 1"),
        ({"loads": [[1]]}, "loads of 1 experts, replicas of 2"),
        ({"topology": Topology.independent([0.1])}, "describes 1 nodes, the plan has 2"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = {"replicas": [[2, 2]], "nodes": 2, "slots_per_node": 2, **change}
    with pytest.raises(PlanError, match=message):
        place_replicas(**arguments)
