import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.block_design import (
    block_design,
    is_block_optimal,
    open_block_design,
)
from megatron_resilient.algorithms.layer_design import holders_in_line
from megatron_resilient.algorithms.loss_tables import CountMeasure, LossTable
from megatron_resilient.algorithms.placement_search import search_placement
from tests.support import planning_oracles as oracles


def test_rank_overlap_cannot_be_beaten_where_it_is_called_optimal():
    """A search that ends finds nothing better, on clusters larger than those enumerated."""
    rng = random.Random(6)
    for nodes, slots, experts in ((7, 3, 6), (8, 2, 6), (8, 3, 5), (9, 3, 4), (10, 2, 5)):
        instances = [
            own
            for own in oracles.partitions(nodes * slots, experts)
            if is_block_optimal(own, nodes, slots)
        ]
        table = LossTable(nodes)
        measure = CountMeasure(table)
        for replicas in rng.sample(instances, min(8, len(instances))):
            design = block_design(replicas, nodes, slots)
            found = search_placement(
                replicas,
                slots,
                table,
                measure,
                min_distinct=[1] * experts,
                kinds=[0] * nodes,
                known_cost=measure(table.fatal(holders_in_line(design))),
            )
            assert found.complete, replicas
            assert found.holders is None, replicas


def test_a_search_without_a_plan_to_beat_finds_the_optimum():
    for replicas, nodes, slots in ((2, 2, 2), 3, 2), ((2, 3, 3, 3, 3), 7, 2):
        table = LossTable(nodes)
        measure = CountMeasure(table)
        found = search_placement(
            replicas,
            slots,
            table,
            measure,
            min_distinct=[1] * len(replicas),
            kinds=[0] * nodes,
        )
        assert measure.counts(table.fatal(found.holders)) == oracles.fewest_fatal_losses(
            replicas, nodes, slots
        )


def test_a_search_that_is_cut_short_says_so():
    table = LossTable(6)
    found = search_placement(
        (3,) * 6,
        3,
        table,
        CountMeasure(table),
        min_distinct=[1] * 6,
        kinds=range(6),
        budget=10,
    )
    assert not found.complete
    assert found.holders is None


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_designs_respect_nodes_slots_and_replicas(nodes, slots, data):
    experts = data.draw(st.integers(1, min(nodes * slots, 40)))
    cuts = data.draw(
        st.lists(
            st.integers(0, nodes * slots - experts), min_size=experts - 1, max_size=experts - 1
        )
    )
    edges = [0, *sorted(cuts), nodes * slots - experts]
    replicas = sorted(1 + b - a for a, b in itertools.pairwise(edges))
    for design in (
        block_design(replicas, nodes, slots),
        open_block_design(replicas, nodes, slots),
    ):
        if design is None:
            continue
        assert sum(own.nodes for own in design) == nodes
        assert all(len(own.experts) <= slots for own in design)
        for holders, count in zip(holders_in_line(design), replicas, strict=True):
            assert 1 <= holders.bit_count() <= count


@pytest.mark.parametrize("replicas", [(20,) * 40 + (24,) * 8, (40,) * 24])
def test_large_counts_are_designed_coarsely(replicas):
    """No block is much smaller than the least replicated expert would allow."""
    slots = 20
    nodes = sum(replicas) // slots
    design = open_block_design(replicas, nodes, slots)
    smallest = min(own.bit_count() for own in holders_in_line(design))
    assert smallest >= 0.8 * replicas[0]
