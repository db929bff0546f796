"""The event loop: scenarios added up by hand, closed forms, and what must hold for any trace."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.algorithms.checkpoint_tuning import overhead, save_interval
from megatron_resilient.simulation.costs import Costs, SaveCost
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.job import Job
from megatron_resilient.simulation.systems import BASES, DEFAULT_SYSTEMS
from megatron_resilient.simulation.trace import Trace
from tests.support.simulated import PLAIN, outcome, trace, workload

SYSTEMS = (*DEFAULT_SYSTEMS, "groups")
REPLACED = (95.0, ["n0"], ["m0"])


def spent(result):
    own = result.outcome.accounts
    return (own.productive, own.lost, own.stalled, own.recovery, own.idle)


def test_restart_by_hand():
    """Saves begin at 10, 22, .. 94; the last one is cut short, so step 70 is what is there."""
    done = outcome("restart", trace(4, 200.0, REPLACED))
    assert done.steps == 141
    assert done.outcome.accounts.lost_steps == 10
    assert spent(done) == pytest.approx((141, 10, 29, 20, 0))
    assert done.outcome.rollbacks == done.outcome.interruptions == 1
    assert done.goodput == pytest.approx(141 / 200)
    assert done.ettr == pytest.approx(141 / 200)


def test_in_process_recovery_differs_by_its_seconds():
    done = outcome("in-process", trace(4, 200.0, REPLACED))
    assert spent(done)[1] == pytest.approx(10)
    assert spent(done)[3] == pytest.approx(10)


@pytest.mark.parametrize("name", ["ours", "no-replicas", "groups"])
def test_who_keeps_state_loses_no_step(name):
    done = outcome(name, trace(4, 200.0, REPLACED))
    assert done.outcome.accounts.lost_steps == 0
    assert done.outcome.rollbacks == 0
    # Of 200 s 5 are recovery; a save at 94 is cut short after 1 s.
    assert spent(done) == pytest.approx((164, 0, 31, 5, 0))
    # Without replicas a node takes one expert of each layer along.
    assert done.outcome.expert_restores == (name == "no-replicas")


def test_part_of_a_step_is_lost():
    done = outcome("ours", trace(4, 50.0, (5.25, ["n0"], ["m0"])))
    assert done.outcome.accounts.lost == pytest.approx(0.25)
    assert done.outcome.accounts.lost_steps == 0


def test_a_loss_during_a_recovery_starts_it_again():
    done = outcome("ours", trace(4, 50.0, (5.0, ["n0"], ["m0"]), (8.0, ["n1"], ["m1"])))
    assert done.outcome.accounts.recovery == pytest.approx(8)
    assert done.outcome.interruptions == 2


def test_losses_of_one_recovery_count_together():
    """Two nodes hold each expert: one at a time may go, but not both before the state is whole."""
    work = workload(nodes=2, experts=4, slots=4)
    apart = trace(2, 100.0, (25.0, ["n0"], ["m0"]), (40.0, ["n1"], ["m1"]))
    close = trace(2, 100.0, (25.0, ["n0"], ["m0"]), (27.0, ["n1"], ["m1"]))
    assert outcome("ours", apart, work).outcome.accounts.lost_steps == 0
    done = outcome("ours", close, work)
    assert done.outcome.rollbacks == 1
    assert done.outcome.accounts.lost_steps == 1  # 21 were done, 20 are in the save of 22 s


def test_lost_experts_come_from_the_save_alone_or_all_goes_back():
    work = workload(nodes=4, experts=4, slots=1)
    events = trace(4, 100.0, (50.0, ["n0"], ["m0"]))
    done = outcome("ours", events, work)
    assert done.outcome.expert_restores == 1
    assert done.outcome.accounts.lost_steps == 0
    # At 50 s 42 steps are done, 40 of them saved; each layer loses one expert's tokens of two.
    tokens = sum(map(sum, work.loads))
    slots = done.policy.placements.slots(4)[:, 0, 0]
    lost = sum(row[expert] for row, expert in zip(work.loads, slots, strict=True)) * 2
    assert done.outcome.lost_tokens == pytest.approx(lost / (tokens * done.steps))
    exact = outcome("ours", events, work, exact=True)
    assert exact.outcome.accounts.lost_steps == 2
    assert exact.outcome.lost_tokens == 0


def test_too_few_nodes_wait_and_start_from_the_checkpoint():
    work = workload(nodes=2, experts=4, slots=2)
    done = outcome("ours", trace(2, 100.0, (25.0, ["n0"], []), (60.0, [], ["m0"])), work)
    assert spent(done)[4] == pytest.approx(35)
    assert done.outcome.accounts.recovery == pytest.approx(20)
    assert done.outcome.accounts.lost_steps == 1


def test_nodes_join_at_a_step_boundary_after_the_window():
    """Half the nodes take twice as long; two join, at 10 s with a window of 3, at 14 s."""
    done = outcome("ours", trace(2, 40.0, (10.0, [], ["n2", "n3"])), workload(nodes=4))
    assert done.outcome.joins == 1
    # 7 steps of 2 s, 5 s of joining, then steps of 1 s: a save after step 10 at 22 s, one at 34.
    assert done.steps == 7 + 3 + 10 + 4
    assert spent(done) == pytest.approx((14 + 17, 0, 4, 5, 0))


def test_stock_takes_nodes_in_at_a_save():
    done = outcome("restart", trace(2, 60.0, (10.0, [], ["n2", "n3"])), workload(nodes=4))
    assert done.outcome.joins == 1
    assert done.outcome.accounts.lost_steps == 0
    assert spent(done) == pytest.approx((20 + 16, 0, 4, 20, 0))
    assert done.steps == 10 + 16


def test_groups_use_multiples_and_survive_where_a_group_is_left():
    work = workload(nodes=5, experts=4, slots=2)
    done = outcome("groups", trace(5, 100.0, (50.0, ["n0"], [])), work)
    assert done.policy.group_nodes == 2
    assert done.policy.most_nodes == 4
    assert done.outcome.rollbacks == 0
    # n0 and n2 are all that have the first experts.
    both = outcome("groups", trace(5, 100.0, (50.0, ["n0", "n2"], [])), work)
    assert both.outcome.rollbacks == 1


def test_a_spare_of_a_group_may_go_unnoticed():
    work = workload(nodes=5, experts=4, slots=2)
    done = outcome("restart", trace(5, 100.0, (50.0, ["n4"], [])), work)
    assert done.outcome.interruptions == 0


def test_announced_departures_lose_no_step():
    for name in SYSTEMS:
        done = outcome(name, trace(4, 100.0, (50.5, [], ["m0"], ["n0"])))
        assert done.outcome.accounts.lost_steps == 0
        assert done.outcome.lost_tokens == 0
        assert done.outcome.interruptions == 1
    quick = replace(PLAIN, join_seconds=2.0)
    told = outcome("ours", trace(4, 100.0, (50.5, [], ["m0"], ["n0"])), costs=quick)
    assert told.outcome.accounts.recovery == pytest.approx(2)


def test_a_guardian_lost_with_its_ward_takes_dense_state_along():
    work = workload(nodes=4, distributed_optimizer=True)
    near = outcome("ours", trace(4, 100.0, (50.0, ["n0", "n1"], [])), work)
    far = outcome("ours", trace(4, 100.0, (50.0, ["n0", "n2"], [])), work)
    order = far.policy.placements.move(4, [0, 1, 2, 3], 4)[0]
    assert order == [0, 1, 2, 3]
    assert near.outcome.rollbacks == 1
    assert far.outcome.rollbacks == 0


def test_a_save_waits_for_the_one_before():
    costs = replace(PLAIN, our_save=SaveCost(stall_seconds=1.0, persist_seconds=25.0))
    done = outcome("ours", trace(4, 1000.0), costs=costs)
    # Every 10 steps one save of 25 s: training waits 15 s for it.
    assert done.outcome.accounts.stalled == pytest.approx(600, abs=15)


# Closed forms.


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_failures_only_overheads_are_paid(name):
    costs = Costs(step_seconds=2.0)
    done = outcome(name, trace(4, 1e6), costs=costs, interval=0)
    ours = done.system.is_ours
    saving = done.outcome.accounts.stalled / done.outcome.accounts.productive
    per_save = done.policy.stall_seconds(done.settings.k, 4)
    own_step = done.policy.step_seconds(4)
    assert saving == pytest.approx(per_save / (done.settings.interval * own_step), rel=0.01)
    overheads = (1 + costs.resilience_overhead * ours) * (1 + saving)
    assert done.goodput == pytest.approx(1 / overheads, rel=1e-4)


def test_the_interval_of_young_and_daly_is_best_and_costs_what_they_say():
    costs = replace(PLAIN, restart_seconds=30.0)
    events = draw_failures(4, 2000.0, 4e6, seed=3, repair_seconds=0.0)
    faults = 1 / events.mean_seconds_between_losses
    best = save_interval(0.5, 1.0, faults, 2.0)
    assert best == pytest.approx(math.sqrt(2 * 2.0 / faults), abs=1)
    waste = {}
    for interval in (best // 3, best // 2, best, 2 * best, 3 * best):
        done = outcome("restart", events, costs=costs, interval=interval)
        waste[interval] = 1 - done.ettr
        kept = 1 - faults * (30.0 + (interval + 2.0) / 2)
        assert waste[interval] == pytest.approx(1 - kept / (1 + 2.0 / interval), rel=0.04)
        # The formula that intervals are chosen by is that to the first order in what is wasted.
        first_order = overhead(2.0, interval, faults) + faults * 30.0
        assert waste[interval] == pytest.approx(first_order, rel=0.15)
    assert min(waste, key=waste.get) == best
    assert waste[best] < 0.95 * min(waste[best // 2], waste[2 * best])


# What must hold for any trace.

drawn = st.builds(
    draw_failures,
    nodes=st.integers(2, 9),
    mtbf_seconds=st.sampled_from([40.0, 300.0, 2000.0]),
    seconds=st.just(6000.0),
    seed=st.integers(0, 10_000),
    repair_seconds=st.sampled_from([None, 0.0, 30.0, 900.0]),
    nodes_per_failure=st.sampled_from([1.0, 1.5, 3.0]),
)


@settings(max_examples=60)
@given(
    drawn,
    st.sampled_from(SYSTEMS),
    st.sampled_from([1, 7, 50]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_all_time_is_accounted_for(events, name, interval, slots, exact):
    nodes = max(events.most_nodes, -(-4 // slots))
    work = workload(nodes=nodes, slots=slots, distributed_optimizer=exact)
    done = outcome(name, events, work, interval=interval, exact=exact)
    own = done.outcome.accounts
    assert own.seconds == pytest.approx(events.seconds, abs=1e-6)
    assert min(spent(done)) >= -1e-6
    assert own.steps >= 0
    assert done.ettr <= 1
    assert (done.outcome.lost_tokens > 0) <= done.system.is_ours
    again = outcome(name, events, work, interval=interval, exact=exact)
    assert again.outcome == done.outcome


@settings(max_examples=60)
@given(drawn, st.sampled_from(SYSTEMS), st.sampled_from([1, 7, 50]))
def test_saves_taken_in_one_go_change_nothing(events, name, interval):
    work = workload(nodes=events.most_nodes, experts=4, slots=2)
    quick = outcome(name, events, work, interval=interval, k=1, lost_tokens=0.001)
    skip = Job._skip
    Job._skip = lambda self, until: None
    try:
        slow = outcome(name, events, work, interval=interval, k=1, lost_tokens=0.001)
    finally:
        Job._skip = skip
    assert spent(quick) == pytest.approx(spent(slow), abs=1e-5)
    assert quick.outcome.lost_tokens == pytest.approx(slow.outcome.lost_tokens)
    assert abs(quick.steps - slow.steps) <= 1  # where a step ends with the trace
    for name in ("interruptions", "joins", "rollbacks", "expert_restores", "k"):
        assert getattr(quick.outcome, name) == getattr(slow.outcome, name)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.data(), st.sampled_from(["restart", "in-process"]))
def test_more_failures_never_give_more(seed, data, name):
    """Of nested traces without repairs, for systems that go back to fixed points."""
    events = draw_failures(8, 400.0, 6000.0, seed=seed)
    kept = data.draw(st.lists(st.booleans(), min_size=len(events.changes)))
    fewer = Trace(
        events.start,
        tuple(change for change, keep in zip(events.changes, kept, strict=False) if keep),
        events.seconds,
        "part",
    )
    work = workload(nodes=8)  # each node has all experts: any number of nodes is used
    more, less = outcome(name, events, work), outcome(name, fewer, work)
    assert more.steps <= less.steps
    assert more.goodput <= less.goodput


@pytest.mark.parametrize("name", BASES)
def test_results_scale_with_time(name):
    """Nothing in the loop has a unit of its own."""
    events = draw_failures(4, 300.0, 5000.0, seed=4, repair_seconds=60.0)
    ten = Trace(
        events.start,
        tuple(replace(change, seconds=change.seconds * 8) for change in events.changes),
        events.seconds * 8,
        "slow",
    )
    fields = [field for field in PLAIN.to_plain() if field.endswith("_seconds")]
    save = SaveCost(stall_seconds=16.0, persist_seconds=4.0)
    slow = replace(
        PLAIN,
        stock_save=save,
        our_save=save,
        **{field: getattr(PLAIN, field) * 8 for field in fields},
    )
    work = workload(slots=2)
    first, second = outcome(name, events, work), outcome(name, ten, work, slow)
    assert first.steps == second.steps
    assert first.ettr == pytest.approx(second.ettr)
