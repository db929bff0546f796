import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_resilient.algorithms.migration import (
    EMPTY,
    assign_nodes,
    assign_nodes_greedily,
    plan_migration,
)
from megatron_resilient.algorithms.planner import make_plan
from megatron_resilient.errors import PlanError


@st.composite
def moves(draw):
    """Held and wanted slots, [layers, ranks, slots], and ranks per node."""
    layers, together = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = together * draw(st.integers(1, 4))
    experts = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    held = rng.integers(EMPTY, experts, (layers, ranks, draw(st.integers(1, 3))))
    wanted = rng.integers(0, experts, (layers, ranks, draw(st.integers(1, 3))))
    return held, wanted, together


def contents(slots, layer, rank):
    return set(slots[layer, rank].tolist()) - {EMPTY}


@given(moves())
def test_after_the_fetches_every_rank_has_what_its_slots_need(move):
    held, wanted, together = move
    got = plan_migration(held, wanted, together)
    have = {
        (layer, rank): contents(held, layer, rank)
        for layer in range(held.shape[0])
        for rank in range(held.shape[1])
    }
    for layer, expert, source, destination in zip(*got.fetches, strict=True):
        assert expert in contents(held, layer, source)
        assert expert not in have[layer, destination]  # nothing is sent twice, or for nothing
        have[layer, destination].add(int(expert))
    for layer, expert, destination in got.missing:
        assert not (held[layer] == expert).any()
        have[layer, destination].add(int(expert))
    for (layer, rank), experts in have.items():
        assert contents(got.slots, layer, rank) <= experts


@given(moves())
def test_parts_are_permuted_alike_in_all_layers_and_within_nodes(move):
    held, wanted, together = move
    got = plan_migration(held, wanted, together)
    ranks = wanted.shape[1]
    assert sorted(got.rank_of.tolist()) == list(range(ranks))
    assert (got.slots[:, got.rank_of] == wanted).all()
    assert (got.rank_of // together == np.repeat(got.node_of, together)).all()


def needed(held, wanted, node_of, together):
    """Counts experts that nodes lack for their parts."""
    layers = len(held)
    total = 0
    for part, node in enumerate(node_of):
        for layer in range(layers):
            of_part = set(wanted[layer, part * together : (part + 1) * together].ravel().tolist())
            of_node = set(held[layer, node * together : (node + 1) * together].ravel().tolist())
            total += len(of_part - of_node)
    return total


@settings(max_examples=60)
@given(moves())
def test_no_permutation_of_the_nodes_needs_fewer_experts(move):
    held, wanted, together = move
    got = plan_migration(held, wanted, together)
    nodes = held.shape[1] // together
    best = min(
        needed(held, wanted, order, together) for order in itertools.permutations(range(nodes))
    )
    assert needed(held, wanted, got.node_of, together) == best


@given(st.integers(1, 7), st.integers(0, 2**32))
def test_the_papers_greedy_mapping_is_never_better(nodes, seed):
    common = np.random.default_rng(seed).integers(0, 9, (nodes, nodes))
    greedy, exact = assign_nodes_greedily(common), assign_nodes(common)
    assert sorted(greedy) == sorted(exact) == list(range(nodes))
    parts = np.arange(nodes)
    assert common[exact, parts].sum() >= common[greedy, parts].sum()


def test_greedy_can_be_worse():
    common = np.array([[10, 9], [9, 0]])
    parts = np.arange(2)
    assert common[assign_nodes_greedily(common), parts].sum() == 10
    assert common[assign_nodes(common), parts].sum() == 18


@settings(max_examples=60)
@given(moves())
def test_no_owner_sends_more_than_it_must(move):
    """The busiest sender between nodes, against a linear program over all choices of owners."""
    held, wanted, together = move
    got = plan_migration(held, wanted, together)
    ranks = held.shape[1]
    far = got.fetches.source // together != got.fetches.destination // together
    fetches = list(zip(*(column[far].tolist() for column in got.fetches), strict=True))
    near = list(zip(*(column[~far].tolist() for column in got.fetches), strict=True))
    for layer, expert, _, destination in fetches:
        node = destination // together
        assert not (held[layer, node * together : (node + 1) * together] == expert).any()
    assert all(expert in contents(held, layer, source) for layer, expert, source, _ in near)
    if not fetches:
        return
    choices = [
        (index, owner)
        for index, (layer, expert, _, _) in enumerate(fetches)
        for owner in range(ranks)
        if expert in contents(held, layer, owner)
    ]
    objective = np.zeros(len(choices) + 1)
    objective[-1] = 1
    once = np.zeros((len(fetches), len(choices) + 1))
    sends = np.zeros((ranks, len(choices) + 1))
    sends[:, -1] = -1
    for column, (index, owner) in enumerate(choices):
        once[index, column] = sends[owner, column] = 1
    bound = linprog(objective, sends, np.zeros(ranks), once, np.ones(len(fetches))).fun
    busiest = np.bincount([source for _, _, source, _ in fetches]).max()
    assert busiest == np.ceil(bound - 1e-6)


def test_what_is_there_already_is_left_alone():
    held = make_plan([[5, 3, 9, 1], [1, 1, 1, 1]], 4, 2, min_replicas=1).placement.by_rank
    got = plan_migration(held, held)
    assert got.node_of.tolist() == [0, 1, 2, 3]
    assert not len(got.fetches.layer)
    # Nodes that have changed places play each other's part: nothing moves.
    swapped = plan_migration(held[:, [1, 0, 3, 2]], held)
    assert not len(swapped.fetches.layer)
    assert swapped.node_of.tolist() == [1, 0, 3, 2]


def test_after_a_loss_only_what_has_to_move_moves():
    loads = [[9, 7, 5, 3, 2, 1, 1, 1]] * 3
    before = make_plan(loads, 6, 4, min_replicas=2).placement.by_rank
    after = make_plan(loads, 5, 4, min_replicas=2).placement.by_rank
    got = plan_migration(np.delete(before, 2, axis=1), after)
    assert not len(got.missing)
    assert 0 < len(got.fetches.layer) < after.size / 2


def test_a_newcomer_and_a_lost_expert():
    held = np.array([[[0, 1], [EMPTY, EMPTY]]])
    got = plan_migration(held, np.array([[[0, 1], [1, 2]]]))
    assert list(zip(*(column.tolist() for column in got.fetches), strict=True)) == [(0, 1, 0, 1)]
    assert got.missing.tolist() == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("held", "wanted", "together", "message"),
    [
        ([[[0]]], [[[0], [0]]], 1, "for the same layers and ranks"),
        ([[0]], [[0]], 1, "must be"),
        ([[[0], [0], [0]]], [[[0], [0], [0]]], 2, "3 ranks do not form nodes of 2 ranks"),
        ([[[0]]], [[[EMPTY]]], 1, "has an empty slot"),
    ],
)
def test_arguments_that_do_not_fit(held, wanted, together, message):
    with pytest.raises(PlanError, match=message):
        plan_migration(np.array(held), np.array(wanted), together)
