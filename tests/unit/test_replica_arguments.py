"""What replicas cannot be combined with is refused by name, before anything is built."""

from argparse import Namespace

import pytest

from megatron_resilient.config import ReplicaConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import replica_arguments

ARGS = {
    "num_experts": 8,
    "num_layers": 4,
    "moe_layer_freq": 1,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": None,
    "swiglu": True,
    "add_bias_linear": False,
    "bf16": False,
    "fp16": False,
    "accumulate_allreduce_grads_in_fp32": False,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "optimizer": "adam",
    "use_distributed_optimizer": False,
    "dist_ckpt_optim_fully_reshardable": False,
    "resilient_checkpoint_format": "torch_dist",
    "save": None,
    "load": None,
}


def check(slots=4, config=None, **changes):
    replica_arguments.check(
        Namespace(**(ARGS | changes)), config or ReplicaConfig(slots_per_rank=slots)
    )


def test_what_can_be_combined(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check()
    check(slots=0, num_experts=None)
    check(use_distributed_optimizer=True, save="x", dist_ckpt_optim_fully_reshardable=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "the model has no experts"),
        ({"slots": 1}, "4 slots for 8 experts; pass at least 2"),
        ({"slots": 9}, "no use for a second slot of the same expert; pass at most 8"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor 1.0 with"),
        ({"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity True"),
        ({"moe_use_upcycling": True}, "--moe-use-upcycling True"),
        ({"log_params_norm": True}, "--log-params-norm True"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp True"),
        ({"fp8": "e4m3"}, "--fp8 e4m3"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        (
            {"use_distributed_optimizer": True, "expert_model_parallel_size": 2},
            "make --expert-model-parallel-size 2 times larger",
        ),
        (
            {"use_distributed_optimizer": True, "save": "x"},
            "add --dist-ckpt-optim-fully-reshardable",
        ),
    ],
)
def test_what_is_refused(monkeypatch, changes, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as caught:
        check(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_of_a_slot():
    # 128 x 1024 (gate and up) and 512 x 128 (down), fp32: weights, gradients, two moments.
    elements = 128 * 1024 + 512 * 128
    assert replica_arguments.slot_bytes(Namespace(**ARGS)) == {
        "weights": 4 * elements,
        "gradients": 4 * elements,
        "optimizer": 8 * elements,
    }
    half = Namespace(**(ARGS | {"bf16": True, "add_bias_linear": True, "swiglu": False}))
    elements = 2 * 128 * 512 + 512 + 128
    assert replica_arguments.slot_bytes(half) == {
        "weights": 2 * elements,
        "gradients": 2 * elements,
        "optimizer": 12 * elements,
    }


@pytest.mark.parametrize(
    ("frequency", "stages", "layers"), [(1, 1, 4), (2, 1, 2), ([0, 1, 1, 1], 1, 3), (1, 2, 2)]
)
def test_moe_layers_of_the_fullest_stage(frequency, stages, layers):
    args = Namespace(
        **(ARGS | {"moe_layer_freq": frequency, "pipeline_model_parallel_size": stages})
    )
    assert replica_arguments.moe_layers(args) == layers


def test_a_limit_of_memory_says_how_many_slots_fit():
    per_slot = 4 * sum(replica_arguments.slot_bytes(Namespace(**ARGS)).values())
    limit = 3.5 * per_slot / replica_arguments.GIB
    check(config=ReplicaConfig(slots_per_rank=3, max_expert_gib=limit))
    with pytest.raises(ConfigError, match="at most 3 slots fit"):
        check(config=ReplicaConfig(slots_per_rank=4, max_expert_gib=limit))


def test_the_table_says_what_replicas_cost():
    lines = replica_arguments.memory_table(Namespace(**ARGS), ReplicaConfig(slots_per_rank=4))
    assert lines[0] == "expert slots of a rank: 4 in 4 MoE layers (without replicas: 2)"
    assert [line.split()[0] for line in lines[1:]] == [
        "weights",
        "gradients",
        "optimizer",
        "together",
    ]
