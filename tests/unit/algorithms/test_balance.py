"""Balance of ranks with two slots per expert on average: the bars of the project."""

import numpy as np
import pytest

from megatron_resilient.algorithms.planner import make_plan
from megatron_resilient.algorithms.token_assignment import assign_tokens, max_over_mean

TOKENS_PER_RANK = 8192
CLUSTERS = [(8, 4, 1), (8, 1, 4), (64, 8, 1), (64, 2, 4), (128, 16, 1)]


def shares(kind: str, experts: int) -> np.ndarray:
    """Returns the share of every expert in the tokens."""
    weights = np.ones(experts)
    if kind == "one hot":
        weights = weights * 0.3 / (experts - 1)
        weights[experts // 3] = 0.7
    elif kind == "few hot":
        hot = max(2, experts // 16)
        weights[:hot] += 0.7 / 0.3 * experts / hot
    elif kind == "zipf":
        weights = np.arange(1, experts + 1) ** -1.2
    return weights / weights.sum()


def plan_slots(loads, nodes, ranks_per_node):
    """Plans one layer with two slots per expert; returns [ranks, slots per rank]."""
    experts = len(loads)
    plan = make_plan(
        [loads.tolist()],
        nodes,
        2 * experts // nodes,
        ranks_per_node=ranks_per_node,
        max_imbalance=1.03,
        effort=0,
    )
    return plan.placement.by_rank[0]


def stock_imbalance(loads, ranks):
    """Returns what contiguous experts without replicas give."""
    return max_over_mean(np.asarray(loads).reshape(ranks, -1).sum(axis=1))


@pytest.mark.parametrize(("experts", "nodes", "ranks_per_node"), CLUSTERS)
@pytest.mark.parametrize("kind", ["uniform", "one hot", "few hot", "zipf"])
def test_steady_loads(kind, experts, nodes, ranks_per_node):
    rng = np.random.default_rng(11)
    ranks = nodes * ranks_per_node
    share = rng.permutation(shares(kind, experts))
    seen = rng.multinomial(TOKENS_PER_RANK * ranks * 10, share)
    slots = plan_slots(seen, nodes, ranks_per_node)
    for _ in range(3):
        tokens = rng.multinomial(TOKENS_PER_RANK, share, size=ranks)
        got = assign_tokens(tokens, slots, ranks_per_node=ranks_per_node)
        assert got.imbalance <= 1.05


def drifting(experts, steps, rng):
    """A Zipf load whose ranking turns into another one every 20 steps."""
    old = rng.permutation(shares("zipf", experts))
    for step in range(steps):
        if step % 20 == 0:
            new = rng.permutation(shares("zipf", experts))
            start = old
        old = start + (new - start) * (step % 20) / 20
        yield old


def bursts(experts, steps, rng):
    """Even load, but for ten steps of every twenty one expert takes 30 % of the tokens."""
    for step in range(steps):
        if step % 20 == 0:
            hot = rng.integers(experts)
        share = np.ones(experts) / experts
        if step % 20 >= 10:
            share = np.full(experts, 0.7 / (experts - 1))
            share[hot] = 0.3
        yield share


@pytest.mark.parametrize(("experts", "nodes", "ranks_per_node"), CLUSTERS[:4])
@pytest.mark.parametrize("workload", [drifting, bursts])
def test_loads_that_change_are_followed_by_a_window(workload, experts, nodes, ranks_per_node):
    """A new plan every second step from the last four; the mean over steps counts."""
    rng = np.random.default_rng(12)
    ranks = nodes * ranks_per_node
    window: list[np.ndarray] = []
    ours, stock = [], []
    for step, share in enumerate(workload(experts, 60, rng)):
        tokens = rng.multinomial(TOKENS_PER_RANK, share, size=ranks)
        if window and step % 2 == 0:
            slots = plan_slots(np.sum(window, axis=0), nodes, ranks_per_node)
        if window:
            ours.append(assign_tokens(tokens, slots, ranks_per_node=ranks_per_node).imbalance)
            stock.append(stock_imbalance(tokens.sum(axis=0), ranks))
        else:
            slots = plan_slots(tokens.sum(axis=0), nodes, ranks_per_node)
        window = [*window, tokens.sum(axis=0)][-4:]
    assert np.mean(ours) <= 1.3
    assert np.mean(ours) < np.mean(stock)
