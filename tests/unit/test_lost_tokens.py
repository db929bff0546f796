"""Tokens that recoveries lose, and the K that keeps them few."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.expert_selection import TwoLevels, select_two_levels
from megatron_resilient.algorithms.lost_tokens import DynamicK, TokenLedger, expected_share
from megatron_resilient.errors import PlanError


def plain_of(ledger, step):
    """What the manifest of a step's save has of the ledger."""
    return ledger.to_plain() | {"persist": ledger.persist_marks(step)}


def run(ledger, steps, interval, k, per_expert=1, first=0):
    """Trains with even loads, saving every `interval` steps; returns the last manifest's ledger."""
    layers, experts = len(ledger.routed), len(ledger.routed[0])
    manifest = None
    for step in range(first + 1, first + steps + 1):
        ledger.add([[per_expert] * experts for _ in range(layers)])
        if step % interval == 0:
            save = step // interval - 1
            ledger.saved(step, select_two_levels("sequential", save, layers, experts, k, k))
            manifest = json.dumps(plain_of(ledger, step))
            ledger.persisted(step)
    return TokenLedger.from_plain(json.loads(manifest))


def test_lost_tokens_of_a_small_case():
    ledger = TokenLedger(1, 3)
    ledger.add([[10, 20, 30]])
    ledger.saved(1, TwoLevels([(0, 1)], [(0,)]))
    ledger.persisted(1)
    ledger.add([[1, 2, 3]])
    ledger.saved(2, TwoLevels([(1, 2)], [(1,)]))
    ledger.add([[100, 100, 100]])  # trained again after the recovery
    manifest = TokenLedger.from_plain(plain_of(ledger, 2))
    assert ledger.unsaved("snapshot") == [[101, 100, 100]]
    assert ledger.unsaved("persist") == [[101, 122, 133]]
    assert manifest.unsaved("persist") == [[101, 100, 133]]


def test_what_came_after_the_checkpoint_is_not_lost():
    ledger = TokenLedger(2, 2)
    ledger.add([[4, 6], [5, 5]])
    ledger.saved(1, TwoLevels([(0,), (0, 1)], [(0,), (0, 1)]))
    manifest = TokenLedger.from_plain(plain_of(ledger, 1))
    ledger.add([[100, 100], [100, 100]])
    lost = manifest.lost()
    assert lost.tokens == [[0, 6], [0, 0]]
    assert lost.share == pytest.approx((6 / 10 + 0) / 2)
    assert manifest.lost(planned=[100, 100]).share == pytest.approx(0.03)


def test_an_expert_from_an_older_file_loses_more_and_one_from_memory_less():
    ledger = TokenLedger(1, 2)
    ledger.add([[3, 3]])
    old = ledger.routed[0][0]
    ledger.saved(1, TwoLevels([(0,)], [(0,)]))
    ledger.persisted(1)
    ledger.add([[5, 5]])
    ledger.saved(2, TwoLevels([(0, 1)], [(0,)]))
    manifest = TokenLedger.from_plain(plain_of(ledger, 2))
    assert manifest.lost().tokens == [[0, 8]]
    assert manifest.lost({(0, 0): old}).tokens == [[5, 8]]
    assert manifest.lost({(0, 1): 8}).tokens == [[0, 0]]
    assert manifest.lost({(0, 1): 9}).tokens == [[0, 0]]  # memory is ahead of the checkpoint


def test_a_failed_save_saves_nothing():
    ledger = TokenLedger(1, 1)
    ledger.add([[5]])
    ledger.saved(1, TwoLevels([(0,)], [(0,)]))
    ledger.abandoned(1)
    ledger.add([[2]])
    assert ledger.unsaved("persist") == [[7]]
    with pytest.raises(KeyError):
        ledger.persisted(1)


def test_what_is_lost_is_lost_once():
    manifest = run(TokenLedger(1, 4), 8, 4, 1)
    first = manifest.lost()
    assert sum(map(sum, first.tokens)) > 0
    manifest.restored()
    assert sum(map(sum, manifest.lost().tokens)) == 0


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 3))
def test_even_loads_lose_what_the_formula_says(experts, interval, layers):
    for k in range(1, experts + 1):
        if experts % k:
            continue
        steps = 4 * interval * experts
        manifest = run(TokenLedger(layers, experts), steps, interval, k)
        share = manifest.lost(planned=[1000 * experts] * layers).share
        assert share == pytest.approx(expected_share(interval, experts, k, 1000))


def test_the_papers_limit():
    # 3.75 % is the loss of one fault with 8 experts, K = 2, a save every 32 of 1280 steps.
    assert expected_share(32, 8, 2, 1280) == pytest.approx(0.0375)
    assert expected_share(32, 8, 8, 1280) == 0


def test_the_snapshot_loses_less_than_storage():
    ledger = TokenLedger(1, 4)
    for step in range(1, 9):
        ledger.add([[1] * 4])
        ledger.saved(step, select_two_levels("sequential", step, 1, 4, 3, 1))
        ledger.persisted(step)
    assert sum(ledger.unsaved("snapshot")[0]) < sum(ledger.unsaved("persist")[0])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"routed": [[1]], "snapshot": [[1]], "persist": [[1, 2]]},
        {"routed": [["x"]], "snapshot": [[1]], "persist": [[1]]},
        {"routed": [[1], [1, 2]], "snapshot": [[1], [1, 2]], "persist": [[1], [1, 2]]},
    ],
)
def test_other_values_are_no_ledger(values):
    with pytest.raises(PlanError):
        TokenLedger.from_plain(values)


def test_tokens_of_another_model_are_refused():
    with pytest.raises(PlanError, match="another number"):
        TokenLedger(1, 2).add([[1, 2, 3]])


@given(
    st.integers(2, 64),
    st.integers(1, 100),
    st.lists(st.floats(0.5, 1.0), max_size=10),
    st.floats(0.01, 0.1),
)
def test_the_total_stays_below_the_limit_if_faults_come_as_expected(
    experts, interval, faults, limit
):
    total_steps = 1000
    control = DynamicK(experts, limit=limit)
    k = control.plan(interval, total_steps, len(faults))
    for number, size in enumerate(faults):
        lost = size * expected_share(interval, experts, k, total_steps)
        k = control.on_fault(lost, interval, total_steps, len(faults) - number - 1)
    assert control.lost <= limit + 1e-12


def test_uneven_loads_raise_k():
    even, uneven = DynamicK(16, k=2), DynamicK(16, k=2)
    share = expected_share(10, 16, 2, 10_000)
    assert even.on_fault(share, 10, 10_000, 5) == 2
    assert uneven.on_fault(3 * share, 10, 10_000, 5) == 4


def test_k_ends_at_all_experts():
    control = DynamicK(6, limit=0.0)
    assert control.plan(10, 100, 1.0) == 6
    assert control.plan(10, 100, 1.0) == 6


def test_no_faults_to_come_keep_k():
    assert DynamicK(64).plan(10, 100, 0.0) == 1


def test_the_state_of_a_dynamic_k_comes_back():
    control = DynamicK(16, k=2, limit=0.02)
    control.on_fault(0.001, 10, 1000, 3)
    again = DynamicK.from_plain(json.loads(json.dumps(control.to_plain())))
    assert again == control
    with pytest.raises(PlanError):
        DynamicK.from_plain({"k": 1})
