"""Where replicas may be summed in the backward pass."""

from types import SimpleNamespace

import pytest

from megatron_resilient.mcore.replica_overlap import why_late

MODEL = {
    "calculate_per_token_loss": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "mlp_chunks_for_training": 1,
    "hybrid_context_parallel": False,
}
DDP = SimpleNamespace(param_name_patterns_for_fp32_local_accumulation=())


def test_nothing_is_in_the_way_of_a_plain_run():
    assert why_late(SimpleNamespace(**MODEL), DDP, expert_domains=1) is None


@pytest.mark.parametrize("name", MODEL)
def test_what_is_in_the_way_is_named(name):
    model = SimpleNamespace(**(MODEL | {name: 2}))
    assert why_late(model, DDP, expert_domains=1).startswith(f"{name}: ")


def test_several_domains_and_rounded_gradients():
    model = SimpleNamespace(**MODEL)
    assert "domains" in why_late(model, DDP, expert_domains=2)
    rounded = SimpleNamespace(param_name_patterns_for_fp32_local_accumulation=("all",))
    assert "rounded" in why_late(model, rounded, expert_domains=1)
