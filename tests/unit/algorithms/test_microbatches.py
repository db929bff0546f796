"""Batches on any number of ranks: each sample once, whatever worlds a run goes through."""

from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.microbatches import Microbatches, StepSampler

layouts = st.builds(
    lambda real, micro, ranks, stages, more: Microbatches(
        real * micro, micro, ranks, stages, stages + more if stages > 1 else 1
    ),
    real=st.integers(1, 40),
    micro=st.integers(1, 4),
    ranks=st.integers(1, 50),
    stages=st.integers(1, 4),
    more=st.integers(0, 3),
)


def step_of(layout, consumed):
    """{(rank, index): samples} of the real microbatches of one step."""
    return {
        (rank, index): layout.samples(rank, index, consumed)
        for rank in range(layout.ranks)
        for index in range(layout.per_rank)
        if layout.is_real(rank, index)
    }


@given(layout=layouts, consumed=st.integers(0, 1000))
def test_a_step_has_each_sample_once_and_microbatches_are_the_same_in_every_world(layout, consumed):
    step = step_of(layout, consumed)
    assert sorted(i for samples in step.values() for i in samples) == list(
        range(consumed, consumed + layout.batch)
    )
    alone = step_of(Microbatches(layout.batch, layout.micro, 1), consumed)
    assert set(step.values()) == set(alone.values())


@given(layout=layouts)
def test_weights_make_a_mean_over_all_that_run_one_over_the_real(layout):
    run = layout.per_rank * layout.ranks
    assert Fraction(run, layout.real) == Fraction(layout.weight).limit_denominator(10_000)
    assert sum(layout.real_on(rank) for rank in range(layout.ranks)) == layout.real
    assert layout.padded_batch - layout.batch == (run - layout.real) * layout.micro
    if layout.group == 1:
        assert layout.padded_batch - layout.batch < layout.ranks * layout.micro
    if layout.fits:
        assert layout.weight == 1
        assert layout.padded_batch == layout.batch


@given(layout=layouts)
def test_an_interleaved_schedule_gets_the_fewest_microbatches_that_it_accepts(layout):
    def accepts(number):
        # forward_backward_pipelining_with_interleaving raises otherwise.
        last = number % layout.group
        return number >= layout.group and (last == 0 or last >= layout.stages)

    least = -(-layout.real // layout.ranks)
    assert layout.per_rank == next(n for n in range(least, 1000) if accepts(n))


@given(layout=layouts, consumed=st.integers(0, 1000))
def test_an_empty_microbatch_has_samples_of_its_own_step(layout, consumed):
    for rank in range(layout.ranks):
        for index in range(layout.per_rank):
            samples = layout.samples(rank, index, consumed)
            assert len(samples) == layout.micro
            assert consumed <= samples[0]
            assert samples[-1] < consumed + layout.batch


@given(
    real=st.integers(1, 12),
    micro=st.integers(1, 3),
    worlds=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_steps_are_those_of_an_undisturbed_run_through_any_worlds(real, micro, worlds):
    batch = real * micro
    total = batch * sum(steps for _, steps in worlds)
    consumed = 0
    for ranks, steps in worlds:
        layout = Microbatches(batch, micro, ranks)
        loaders = [iter(StepSampler(layout, rank, consumed, total)) for rank in range(ranks)]
        for _ in range(steps):
            drawn = [list(islice(loader, layout.per_rank)) for loader in loaders]
            seen = Counter(
                sample
                for rank, batches in enumerate(drawn)
                for index, samples in enumerate(batches)
                if layout.is_real(rank, index)
                for sample in samples
            )
            assert seen == Counter(range(consumed, consumed + batch))
            consumed += batch
    assert consumed == total


@pytest.mark.parametrize(("total", "steps"), [(0, 0), (15, 0), (16, 0), (23, 0), (24, 1), (41, 3)])
def test_only_complete_steps_are_sampled(total, steps):
    sampler = StepSampler(Microbatches(8, 2, 3), rank=1, consumed=16, total=total)
    assert len(list(sampler)) == len(sampler) == steps * 2


@given(real=st.integers(1, 20), micro=st.integers(1, 4), ranks=st.integers(1, 20))
def test_where_the_world_fits_it_is_megatrons_sampler(real, micro, ranks):
    layout = Microbatches(real * ranks * micro, micro, ranks)
    total = 2 * layout.batch
    for rank in range(ranks):
        wave = ranks * micro
        stock = [
            list(range(start + rank * micro, start + (rank + 1) * micro))
            for start in range(0, total, wave)
        ]
        assert list(StepSampler(layout, rank, 0, total)) == stock
