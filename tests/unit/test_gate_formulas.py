"""Gates against their formulas, written here anew with numpy in float64, and their gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from megatron_resilient.config import GateConfig
from megatron_resilient.mcore.gates import expert_choice, gshard, sigmoid, soft, xmoe
from megatron_resilient.mcore.gates.build import mixtures_per_expert

SEEDS = range(5)
T, E, H, K = 7, 5, 6, 2


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def t(array, grad=False):
    return torch.tensor(array, dtype=torch.float64, requires_grad=grad)


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def kept(scores, k):
    """For each row the k largest entries, one after the other."""
    mask = np.zeros(scores.shape, dtype=bool)
    for row, marks in zip(scores, mask, strict=True):
        for index in sorted(range(len(row)), key=lambda i: -row[i])[:k]:
            marks[index] = True
    return mask


def assert_same(found, expected):
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_gshard(seed):
    x, gate, noise, normal = (
        drawn(seed, T, H),
        drawn(seed + 10, H, E),
        drawn(seed + 20, H, E),
        drawn(seed + 30, T, E),
    )
    h = x @ gate + normal * np.log1p(np.exp(x @ noise))
    expected = np.zeros_like(h)
    for row, (logits, mask) in enumerate(zip(h, kept(h, K), strict=True)):
        expected[row, mask] = softmax(logits[mask], 0)
    noisy = gshard.noisy(t(x @ gate), t(x @ noise), t(normal))
    assert_same(noisy, h)
    weights, routing_map = gshard.choose(noisy, K)
    assert_same(weights, expected)
    assert (routing_map.numpy() == kept(h, K)).all()
    np.testing.assert_allclose(weights.sum(dim=1).numpy(), 1)
    inputs = (t(x @ gate, True), t(x @ noise, True))
    assert gradcheck(lambda a, b: gshard.choose(gshard.noisy(a, b, t(normal)), K)[0], inputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_sigmoid(seed):
    h = drawn(seed, T, E)
    weights, routing_map = sigmoid.choose(t(h), K)
    assert_same(weights, kept(h, K) / (1 + np.exp(-h)))
    assert (routing_map.numpy() == kept(h, K)).all()
    assert gradcheck(lambda a: sigmoid.choose(a, K)[0], (t(h, True),))


@pytest.mark.parametrize("seed", SEEDS)
def test_xmoe(seed):
    x, embeddings, tau = drawn(seed, T, 3), drawn(seed + 10, E, 3), 0.2 + 0.3 * seed
    lengths = [np.sqrt((each**2).sum(axis=1)) for each in (x, embeddings)]
    s = (x @ embeddings.T) / np.outer(*lengths) / tau
    logits = xmoe.cosine_logits(t(x), t(embeddings), t([np.log(tau)]))
    assert_same(logits, s)
    weights, routing_map = xmoe.choose(logits, K)
    assert_same(weights, softmax(s, 1) * kept(s, K))
    assert (routing_map.numpy() == kept(s, K)).all()
    inputs = (t(x, True), t(embeddings, True), t([np.log(tau)], True))
    assert gradcheck(lambda *a: xmoe.choose(xmoe.cosine_logits(*a), K)[0], inputs)


def test_a_token_of_zeros_is_like_every_expert():
    logits = xmoe.cosine_logits(torch.zeros(1, 3), torch.randn(E, 3), torch.zeros(1))
    assert (logits == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_expert_choice(seed):
    h = drawn(seed, T, E)
    wishes = softmax(h, 1)
    expected = kept(wishes.T, 3).T
    found = expert_choice.scores(t(h))
    assert_same(found, wishes)
    routing_map = expert_choice.choose(found, 3)
    assert (routing_map.numpy() == expected).all()
    assert routing_map.sum(dim=0).tolist() == [3] * E

    def weights(a):
        return expert_choice.scores(a).masked_fill(~routing_map, 0.0)

    assert gradcheck(weights, (t(h, True),))


@given(tokens=st.integers(1, 200), experts=st.integers(1, 64), each=st.integers(1, 8))
def test_capacity_is_a_fair_part(tokens, experts, each):
    taken = expert_choice.capacity(tokens, experts, each)
    assert 1 <= taken <= tokens
    assert taken in (1, tokens) or taken * experts <= tokens * each < (taken + 1) * experts


@pytest.mark.parametrize("seed", SEEDS)
def test_soft(seed):
    batch, per_expert = 2, 2
    x, phi = drawn(seed, T, batch, H), drawn(seed + 10, E * per_expert, H)
    matrices = drawn(seed + 20, E, H, H)
    expected = np.zeros_like(x)
    for b in range(batch):
        logits = x[:, b] @ phi.T
        slots = softmax(logits, 0).T @ x[:, b]
        outputs = np.stack([np.tanh(s @ matrices[k // per_expert]) for k, s in enumerate(slots)])
        expected[:, b] = softmax(logits, 1) @ outputs

    def layer(tokens, weights, parts=1):
        """The layer on `parts` ranks, each with a part of every sequence."""
        own = [(each, soft.logits(each, weights)) for each in tokens.chunk(parts)]
        highest = torch.stack([logits.detach().amax(dim=0) for _, logits in own]).amax(dim=0)
        sums = sum(soft.mixture_sums(logits, each, highest) for each, logits in own)
        rows = soft.mixtures(sums).view(E * per_expert, batch, H)
        each_expert = t(matrices).repeat_interleave(per_expert, dim=0)
        outputs = torch.tanh(rows @ each_expert)
        return torch.cat([soft.combine(logits, outputs) for _, logits in own])

    assert_same(layer(t(x), t(phi)), expected)
    assert_same(layer(t(x), t(phi), parts=3), expected)
    assert gradcheck(layer, (t(x[:3], True), t(phi, True)))
    load = soft.load(soft.logits(t(x), t(phi)), E)
    assert float(load.sum()) == pytest.approx(T * batch)


def test_large_logits_mix_without_overflow():
    hidden, phi = torch.full((3, 1, 2), 100.0), torch.full((4, 2), 50.0)
    logits = soft.logits(hidden, phi)
    mixed = soft.mixtures(soft.mixture_sums(logits, hidden, logits.amax(dim=0)))
    assert torch.allclose(mixed, torch.full((4, 2), 100.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_have_the_type_of_the_logits(dtype):
    logits = torch.randn(T, E, dtype=dtype)
    for gate in (gshard, sigmoid, xmoe):
        weights, routing_map = gate.choose(logits, K)
        assert (weights.dtype, routing_map.dtype) == (dtype, torch.bool)
        assert routing_map.sum(dim=1).tolist() == [K] * T


def test_mixtures_are_by_default_as_many_as_tokens_of_top_k():
    assert mixtures_per_expert(GateConfig(), 64, 8, 2) == 16
    assert mixtures_per_expert(GateConfig(), 3, 8, 1) == 1
    assert mixtures_per_expert(GateConfig(gate_mixtures=5), 64, 8, 2) == 5
