"""What gates and the wire cannot be combined with is refused by name, before anything is built."""

from argparse import Namespace

import pytest

from megatron_resilient.config import GATES, GateConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import gate_arguments

ARGS = {
    "num_experts": 8,
    "hidden_size": 64,
    "seq_length": 64,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_score_function": "softmax",
    "moe_token_dispatcher_type": "alltoall",
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "cuda_graph_impl": "none",
    "transformer_impl": "local",
    "bf16": False,
    "fp16": False,
}
AHEAD = {"allow_lookahead_gates": True}


def check(config, **changes):
    gate_arguments.check(Namespace(**(ARGS | changes)), GateConfig(**config))


@pytest.mark.parametrize("gate", GATES)
def test_what_can_be_combined(gate):
    for dispatcher in ("alltoall", "allgather"):
        check({"gate": gate, **AHEAD}, moe_token_dispatcher_type=dispatcher)
    check({"gate": gate, "wire_dtype": "fp8", **AHEAD}, bf16=True)
    check({"gate": gate, "wire_dtype": "bf16", **AHEAD}, tensor_model_parallel_size=2)


def test_dense_models_are_let_alone():
    check({}, num_experts=None)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"gate": "xmoe"}, {"num_experts": None}, "the model has no experts"),
        ({"gate": "xmoe"}, {"moe_router_fusion": True}, "--moe-router-fusion True with"),
        ({"gate": "xmoe"}, {"moe_router_group_topk": 2}, "--moe-router-group-topk 2"),
        ({"gate": "sigmoid"}, {"moe_router_enable_expert_bias": True}, "expert-bias True"),
        ({"gate": "sigmoid"}, {"moe_router_score_function": "sigmoid"}, "a formula of its own"),
        (
            {"gate": "sigmoid"},
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
            "--moe-router-load-balancing-type aux_loss sinkhorn with --resilient-gate sigmoid",
        ),
        ({"gate": "sigmoid"}, {"use_megatron_fsdp": True}, "--use-megatron-fsdp True"),
        ({"gate": "sigmoid"}, {"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"gate": "gshard"}, {"moe_router_topk": 1}, "nothing to learn"),
        ({"gate": "gshard"}, {"moe_router_pre_softmax": True}, "--moe-router-pre-softmax True"),
        ({"gate": "soft"}, {}, "depends on later tokens"),
        ({"gate": "expert-choice"}, {}, "add --resilient-allow-lookahead-gates"),
        (
            {"gate": "expert-choice", **AHEAD},
            {"moe_aux_loss_coeff": [0.0, 0.1]},
            "--moe-aux-loss-coeff 0.0 0.1",
        ),
        ({"gate": "soft", **AHEAD}, {"moe_token_dispatcher_type": "flex"}, "use alltoall or"),
        ({"gate": "soft", **AHEAD}, {"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"gate": "soft", **AHEAD}, {"moe_z_loss_coeff": 0.1}, "--moe-z-loss-coeff 0.1"),
        ({"gate": "soft", **AHEAD}, {"moe_shared_expert_overlap": True}, "add tokens to mixtures"),
        (
            {"gate": "soft", **AHEAD},
            {"overlap_moe_expert_parallel_comm": True},
            "--overlap-moe-expert-parallel-comm True",
        ),
        (
            {"gate": "soft", "gate_mixtures": 3, **AHEAD},
            {"tensor_model_parallel_size": 2, "num_experts": 7},
            "pass --resilient-gate-mixtures 4",
        ),
        ({"gate_temperature": 0.5}, {}, "belongs to --resilient-gate xmoe"),
        ({"gate": "xmoe", "gate_mixtures": 2}, {}, "belongs to --resilient-gate soft"),
        ({"wire_dtype": "fp8"}, {"moe_token_dispatcher_type": "allgather"}, "use alltoall"),
        ({"wire_dtype": "bf16"}, {"bf16": True}, "tokens have two bytes already"),
        ({"wire_dtype": "fp8"}, {"hidden_size": 63}, "--hidden-size 63 must be even"),
        ({"wire_dtype": "fp8"}, {"num_experts": None}, "the model has no experts"),
    ],
)
def test_what_is_refused(config, changes, message):
    with pytest.raises(ConfigError) as caught:
        check(config, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
