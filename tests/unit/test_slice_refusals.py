"""What gradient slices are refused with, each by its name."""

from types import SimpleNamespace

import pytest

from megatron_resilient.mcore.overlap.slice_refusals import why_not

DDP = {
    "overlap_grad_reduce": False,
    "num_distributed_optimizer_instances": 1,
    "reduce_scatter_with_fp32_accumulation": False,
    "param_name_patterns_for_fp32_local_accumulation": (),
}
MODEL = {
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "overlap_moe_expert_parallel_comm": False,
    "mtp_num_layers": None,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "mlp_chunks_for_training": 1,
    "hybrid_context_parallel": False,
    "cuda_graph_impl": "none",
}


def configs(name="", value=None):
    return [
        SimpleNamespace(**(own | ({name: value} if name in own else {}))) for own in (MODEL, DDP)
    ]


def test_nothing_is_in_the_way_of_a_plain_run():
    assert why_not(*configs()) is None


@pytest.mark.parametrize("name", [*DDP, *MODEL])
def test_what_is_in_the_way_is_named(name):
    value = "local" if name == "cuda_graph_impl" else 2
    found = why_not(*configs(name, value))
    assert found.startswith(f"--{name.replace('_', '-')}: ")
