import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_resilient.algorithms.token_assignment import (
    assign_tokens,
    balanced_quotas,
    least_imbalance,
)
from megatron_resilient.errors import PlanError


@st.composite
def problems(draw):
    """Token counts [ranks, experts], slots [ranks, slots per rank], ranks per node."""
    ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, ranks * slots))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spare = rng.integers(0, experts, ranks * slots - experts)
    filled = rng.permutation(np.concatenate([np.arange(experts), spare]))
    # Nothing at all, a few tokens, or many, for each rank and expert by itself.
    most = draw(st.sampled_from([(0,), (0, 1), (9,), (0, 9, 1000)]))
    tokens = rng.integers(0, rng.choice(most, (ranks, experts)) + 1)
    return tokens, filled.reshape(ranks, slots), draw(st.sampled_from([1, 2, 3]))


def by_expert(split, slot_experts, experts):
    """Sums a split over the slots of every expert, [ranks, experts]."""
    total = np.zeros((len(split), experts), dtype=np.int64)
    np.add.at(total.T, slot_experts.ravel(), split.T)
    return total


@given(problems(), st.sampled_from(["even", "balanced", "best"]))
def test_every_token_gets_one_slot_of_its_expert(problem, policy):
    tokens, slot_experts, together = problem
    got = assign_tokens(tokens, slot_experts, policy=policy, ranks_per_node=together)
    assert (got.split >= 0).all()
    assert (by_expert(got.split, slot_experts, tokens.shape[1]) == tokens).all()
    assert (got.split.sum(axis=0) == got.quotas.ravel()).all()
    assert (got.rank_tokens == got.quotas.sum(axis=1)).all()


@given(problems(), st.sampled_from(["even", "balanced", "best"]))
def test_own_rank_first_then_own_node(problem, policy):
    tokens, slot_experts, together = problem
    got = assign_tokens(tokens, slot_experts, policy=policy, ranks_per_node=together)
    ranks, slots = slot_experts.shape
    split = got.split.reshape(ranks, ranks, slots)
    node_of = np.arange(ranks) // together
    for expert in range(tokens.shape[1]):
        quota = np.where(slot_experts == expert, got.quotas, 0).sum(axis=1)
        sent = np.where(slot_experts == expert, split, 0).sum(axis=2)  # [source, destination]
        assert (np.diag(sent) == np.minimum(tokens[:, expert], quota)).all()
        if together > 1:
            for node in set(node_of):
                here = np.flatnonzero(node_of == node)
                stays = sent[np.ix_(here, here)].sum()
                assert stays == min(tokens[here, expert].sum(), quota[here].sum())


@given(problems(), st.sampled_from(["even", "balanced", "best"]))
def test_sender_and_receiver_agree(problem, policy):
    """Each rank computes its own part only, from the same counts."""
    tokens, slot_experts, together = problem
    ranks, slots = slot_experts.shape
    whole = assign_tokens(tokens, slot_experts, policy=policy, ranks_per_node=together).split
    for rank in range(ranks):
        own = assign_tokens(tokens, slot_experts, policy=policy, ranks_per_node=together)
        assert (own.sent_by(rank) == whole[rank].reshape(ranks, slots)).all()
        assert (own.received_by(rank) == whole[:, rank * slots : (rank + 1) * slots]).all()


@given(problems())
def test_algorithm_one_loads_the_replicas_of_an_expert_evenly(problem):
    """Lazarus, section 4.2: every replica takes t_e / r_e, here to within one token."""
    tokens, slot_experts, _ = problem
    got = assign_tokens(tokens, slot_experts, policy="even")
    copies = np.bincount(slot_experts.ravel(), minlength=tokens.shape[1])
    exact = (tokens.sum(axis=0) / copies)[slot_experts]
    assert (np.abs(got.quotas - exact) < 1).all()


def test_odd_tokens_do_not_all_go_to_the_first_rank():
    """One token of each of 64 experts that all ranks hold."""
    slot_experts = np.tile(np.arange(64), (4, 1))
    tokens = np.zeros((4, 64), dtype=int)
    tokens[0] = 1
    got = assign_tokens(tokens, slot_experts, policy="even")
    assert got.rank_tokens.tolist() == [16, 16, 16, 16]


@settings(max_examples=60)
@given(problems())
def test_the_fullest_rank_is_as_empty_as_a_linear_program_makes_it(problem):
    tokens, slot_experts, _ = problem
    ranks, experts = tokens.shape
    total = tokens.sum(axis=0)
    pairs = sorted({(int(e), rank) for rank in range(ranks) for e in slot_experts[rank]})
    objective = np.zeros(len(pairs) + 1)
    objective[-1] = 1  # the fullest rank's tokens
    of_expert = np.zeros((experts, len(pairs) + 1))
    on_rank = np.zeros((ranks, len(pairs) + 1))
    on_rank[:, -1] = -1
    for index, (expert, rank) in enumerate(pairs):
        of_expert[expert, index] = on_rank[rank, index] = 1
    bound = linprog(objective, on_rank, np.zeros(ranks), of_expert, total).fun
    quotas = balanced_quotas(tokens, slot_experts)
    assert quotas.sum(axis=1).max() == np.ceil(bound - 1e-6)


@given(problems())
def test_the_better_of_both(problem):
    tokens, slot_experts, _ = problem
    fullest = {
        policy: assign_tokens(tokens, slot_experts, policy=policy).rank_tokens.max()
        for policy in ("even", "balanced", "best")
    }
    assert fullest["best"] == min(fullest["even"], fullest["balanced"])
    assert assign_tokens(tokens, slot_experts).imbalance == pytest.approx(
        least_imbalance(tokens.sum(axis=0), slot_experts)
    )


def test_ranks_even_out_not_only_replicas():
    """Expert 0 is on both ranks, but rank 1 has expert 1's tokens as well."""
    tokens = np.array([[50, 50], [50, 50]])
    slot_experts = np.array([[0, 0], [0, 1]])
    even = assign_tokens(tokens, slot_experts, policy="even")
    assert even.rank_tokens.tolist() == [67, 133]
    best = assign_tokens(tokens, slot_experts)
    assert best.policy == "balanced"
    assert best.rank_tokens.tolist() == [100, 100]


def test_loads_of_a_long_window_have_an_imbalance():
    slot_experts = np.array([[0, 1], [0, 2]])
    loads = np.array([6, 1, 3])
    expected = least_imbalance(loads, slot_experts)
    assert expected == 1
    assert least_imbalance(loads * 10**15, slot_experts) == pytest.approx(expected, abs=1e-6)


def test_no_tokens_and_one_slot():
    nothing = assign_tokens(np.zeros((2, 3), dtype=int), [[0, 1], [2, 0]])
    assert not nothing.split.any()
    assert nothing.imbalance == 1
    single = assign_tokens([[7]], [[0]])
    assert single.split.tolist() == [[7]]


def test_many_ranks_and_experts():
    rng = np.random.default_rng(1)
    slot_experts = np.concatenate([np.arange(256), rng.integers(0, 256, 256)])
    slot_experts = rng.permutation(slot_experts).reshape(64, 8)
    tokens = rng.multinomial(
        8192, np.arange(1, 257) ** -1.2 / (np.arange(1, 257) ** -1.2).sum(), 64
    )
    got = assign_tokens(tokens, slot_experts, ranks_per_node=8)
    assert (by_expert(got.split, slot_experts, 256) == tokens).all()


@pytest.mark.parametrize(
    ("tokens", "slots", "options", "message"),
    [
        ([[1, 2]], [[0]], {}, "expert 1 has tokens, but no slot holds it"),
        ([[1]], [[1]], {}, "slots must hold experts 0"),
        ([[-1]], [[0]], {}, "must not be negative"),
        ([[0.5]], [[0]], {}, "tokens must be integers"),
        ([[1], [1]], [[0]], {}, "for the same ranks"),
        ([[1]], [[0]], {"policy": "random"}, "policy 'random'"),
        ([[2**31]], [[0]], {"policy": "balanced"}, "2147483648 tokens in one layer"),
    ],
)
def test_arguments_that_do_not_fit(tokens, slots, options, message):
    with pytest.raises(PlanError, match=message):
        assign_tokens(tokens, slots, **options)
