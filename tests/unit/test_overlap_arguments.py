"""What overlap and dispatch cannot be combined with is refused before anything is built."""

from argparse import Namespace

import pytest

from megatron_resilient.comm.node_groups import NODE_MAP
from megatron_resilient.config import DISPATCHES, GateConfig, OverlapConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import overlap_arguments

ARGS = {
    "num_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "recompute_granularity": None,
    "recompute_modules": None,
    "gradient_accumulation_fusion": False,
    "cuda_graph_impl": "none",
    "transformer_impl": "local",
}
FIXED = {"overlap": "fixed"}
NODES = {"WORLD_SIZE": "4", NODE_MAP: "0,0,1,1"}


def check(config, elastic=False, gates=None, **changes):
    overlap_arguments.check(
        Namespace(**(ARGS | changes)), OverlapConfig(**config), GateConfig(**(gates or {})), elastic
    )


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def tell(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return tell


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_what_can_be_combined(nodes, dispatch):
    nodes(**NODES)
    for config in ({}, FIXED, FIXED | {"overlap_degrees": (1, 4)}):
        check(config | {"dispatch": dispatch})
    check(FIXED, expert_tensor_parallel_size=2)
    check(FIXED, gates={"wire_dtype": "fp8"})
    check(FIXED, recompute_granularity="selective", recompute_modules=["moe", "layernorm"])
    check(FIXED, recompute_granularity="full", recompute_modules=["moe_act"])
    check(FIXED, moe_expert_capacity_factor=1.0, moe_shared_expert_intermediate_size=64)


def test_nothing_asked_for_nothing_refused():
    check({}, num_experts=None, moe_token_dispatcher_type="flex", fp8="hybrid")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (FIXED, {"num_experts": None}, "the model has no experts"),
        (FIXED, {"moe_token_dispatcher_type": "allgather"}, "use alltoall"),
        (FIXED, {"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex with"),
        (FIXED, {"moe_pad_expert_input_to_capacity": True}, "nothing is padded"),
        (FIXED, {"moe_router_padding_for_quantization": True}, "nothing is padded"),
        (FIXED, {"moe_router_padding_for_fp8": True}, "nothing is padded"),
        (FIXED, {"fp8": "hybrid"}, "--fp8 hybrid"),
        (FIXED, {"fp4": "e2m1"}, "--fp4 e2m1"),
        (FIXED, {"gradient_accumulation_fusion": True}, "pass --no-gradient-accumulation-fusion"),
        (FIXED, {"overlap_moe_expert_parallel_comm": True}, "another overlap"),
        (FIXED, {"delay_wgrad_compute": True}, "--delay-wgrad-compute True"),
        (FIXED, {"overlap_dispatch_backward_with_experts_wgrad": True}, "need both at once"),
        (FIXED, {"moe_shared_expert_overlap": True}, "shared experts without it work"),
        (FIXED, {"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        (FIXED, {"enable_cuda_graph": True}, "--enable-cuda-graph True"),
        (FIXED, {"external_cuda_graph": True}, "--external-cuda-graph True"),
        (FIXED, {"use_megatron_fsdp": True}, "--use-megatron-fsdp True"),
        (FIXED, {"use_torch_fsdp2": True}, "--use-torch-fsdp2 True"),
        (FIXED, {"expert_gtp_weight_remat_size": 2}, "are sharded"),
        (FIXED, {"gtp_weight_remat_size": 2}, "are sharded"),
        (FIXED, {"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers 1"),
        (FIXED, {"offload_modules": ["core_attn", "expert_fc1"]}, "core_attn expert_fc1"),
        (FIXED, {"transformer_impl": "inference_optimized"}, "a dispatcher of its own"),
        (
            FIXED,
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "--recompute-modules moe_act with --resilient-overlap fixed",
        ),
        ({"dispatch": "2d"}, {"fp8": "hybrid"}, "with --resilient-dispatch 2d"),
        ({"overlap_degrees": (3, 4)}, {}, "--resilient-overlap-degrees 3 4: it belongs to"),
        ({"overlap_order": "scatter-first"}, {}, "--resilient-overlap-order scatter-first: it"),
    ],
)
def test_what_is_refused(nodes, config, changes, message):
    nodes(**NODES)
    with pytest.raises(ConfigError) as caught:
        check(config, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_narrow_outputs_are_not_added_up():
    for changes in ({"expert_tensor_parallel_size": 2}, {"tensor_model_parallel_size": 2}):
        with pytest.raises(ConfigError, match="--resilient-wire-dtype fp8 with --resilient-over"):
            check(FIXED, gates={"wire_dtype": "fp8"}, **changes)


def test_ways_by_node_need_nodes(nodes):
    nodes(WORLD_SIZE="4")
    with pytest.raises(ConfigError, match=f"start with torchrun, or set {NODE_MAP}"):
        check({"dispatch": "1d"})
    check({"dispatch": "1d"}, elastic=True)  # there the coordinator says it
    nodes(**{NODE_MAP: "0,0,0,1"})
    check({"dispatch": "1d"})
    with pytest.raises(ConfigError, match="--resilient-dispatch 2d: nodes have 1 and 3 ranks"):
        check({"dispatch": "2d"})
