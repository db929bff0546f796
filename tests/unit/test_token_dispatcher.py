"""From experts to slots: no token is lost, doubled or sent to another expert."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from megatron_resilient.mcore import experts as slots_of_experts
from megatron_resilient.mcore.token_dispatcher import SlotMap, split_all_tokens, widen


@st.composite
def routings(draw):
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    together = draw(st.integers(1, 3))
    slots = draw(st.integers(-(-experts // ranks), experts))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    while True:
        holding = np.array([random.permutation(experts)[:slots] for _ in range(ranks)])
        if len(np.unique(holding)) == experts:
            break
    topk = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 12))
    maps = []
    for _ in range(ranks * together):
        chosen = torch.zeros((tokens, experts), dtype=torch.bool)
        for row in chosen:
            row[random.permutation(experts)[:topk]] = True
        maps.append(chosen)
    return SlotMap.of(holding.tolist()), maps


@given(routings())
def test_every_pair_goes_to_one_slot_of_its_expert(routing):
    slots, maps = routing
    experts = maps[0].shape[1]
    counts = np.stack([routing_map.sum(dim=0).numpy() for routing_map in maps])
    expert_of_slot = torch.from_numpy(slots.holding_RC.reshape(-1))
    for sender, routing_map in enumerate(maps):
        splits, rank_tokens = split_all_tokens(counts, slots)
        split = splits[sender]
        assert rank_tokens.sum() == counts.sum()
        probs = (torch.rand(routing_map.shape) * routing_map).requires_grad_()
        wide_map, wide_probs = widen(routing_map, probs, split, slots)
        assert np.array_equal(wide_map.sum(dim=0).numpy(), split)
        for expert in range(experts):
            own = expert_of_slot == expert
            assert torch.equal(wide_map[:, own].sum(dim=1), routing_map[:, expert].long())
            assert torch.equal(wide_probs[:, own].sum(dim=1), probs[:, expert])
        weights = torch.rand(wide_probs.shape)
        (gradient,) = torch.autograd.grad((wide_probs * weights).sum(), probs)
        expected = (weights * wide_map) @ torch.nn.functional.one_hot(
            expert_of_slot, experts
        ).float()
        assert torch.allclose(gradient, expected)


@given(routings())
def test_senders_of_one_rank_together_fill_its_share(routing):
    slots, maps = routing
    counts = np.stack([routing_map.sum(dim=0).numpy() for routing_map in maps])
    ranks = len(slots.holding_RC)
    together = len(maps) // ranks
    alone = counts.reshape(ranks, together, -1).sum(axis=1)
    for rank in range(ranks):
        parts = [split_all_tokens(counts, slots)[0][rank * together + i] for i in range(together)]
        assert np.array_equal(sum(parts), split_all_tokens(alone, slots)[0][rank])


class Grouped(torch.nn.Module):
    """Parameters under the names that TEGroupedMLP gives them."""

    def __init__(self, slots):
        super().__init__()
        for linear in ("linear_fc1", "linear_fc2"):
            module = torch.nn.Module()
            for slot in range(slots):
                module.register_parameter(f"weight{slot}", torch.nn.Parameter(torch.zeros(1)))
            self.add_module(linear, module)


def test_slots_of_a_grouped_gemm():
    experts = Grouped(12)
    kinds = slots_of_experts.slot_parameters(experts, 12)
    assert list(kinds) == ["linear_fc1.weight", "linear_fc2.weight"]
    assert kinds["linear_fc2.weight"][11] is experts.linear_fc2.weight11


def test_a_module_that_stacks_its_experts_is_refused():
    experts = torch.nn.Module()
    experts.register_parameter("weight1_stacked", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(TypeError, match="weight1_stacked belongs to no slot"):
        slots_of_experts.slot_parameters(experts, 2)


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        ("local_experts.3.linear_fc1.weight", 3),
        ("linear_fc1.weight10", 10),
        ("linear_fc1.weight2_w", 2),
        ("linear_fc2._extra_state", None),
    ],
)
def test_slot_of_a_state_dict_key(key, slot):
    assert slots_of_experts.slot_of_key(key) == slot
