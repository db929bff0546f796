"""Batches and worlds: what fits, what is refused where it does not, what an elastic run changes."""

from argparse import Namespace

import pytest

from megatron_resilient.algorithms.microbatches import Microbatches
from megatron_resilient.config import ReplicaConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import elastic_arguments, replica_arguments, uneven_arguments
from tests.unit.test_replica_arguments import ARGS as REPLICA_ARGS

ARGS = REPLICA_ARGS | {
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "eval_global_batch_size": None,
    "eval_micro_batch_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "decrease_batch_size_if_needed": False,
    "resilient_slots_per_rank": 0,
}
REFUSED = {
    "step_batch_size_schedule": "0:8 1K:16",
    "dataloader_type": "cyclic",
    "hybrid_context_parallel": True,
    "iterations_to_skip": [3],
    "full_validation": True,
    "sft": True,
    "perform_rl_step": True,
    "moe_token_dispatcher_type": "flex",
    "moe_pad_expert_input_to_capacity": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_enable_routing_replay": True,
    "cuda_graph_impl": "local",
    "experimental_attention_variant": "dsa",
    "qk_clip": True,
    "tensor_parallel_num_weight_shards": 2,
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
}


@pytest.fixture
def world(monkeypatch):
    def set_size(size):
        monkeypatch.setenv("WORLD_SIZE", str(size))

    monkeypatch.delenv(elastic_arguments.COORDINATOR, raising=False)
    monkeypatch.setenv("RANK", "0")
    return set_size


def check(elastic=False, **changes):
    uneven_arguments.check(Namespace(**(ARGS | changes)), elastic)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_only_where_it_matters(world, name):
    value = REFUSED[name]
    flag = f"--{name.replace('_', '-')} "
    world(4)
    check(**{name: value})
    with pytest.raises(ConfigError, match=f"^{flag}.* with an elastic run: "):
        check(elastic=True, **{name: value})
    world(3)
    with pytest.raises(
        ConfigError, match=f"^{flag}.* with --global-batch-size 8 on 3 data-parallel ranks: "
    ):
        check(**{name: value})


def test_what_is_exact_in_any_world(world):
    for size in range(1, 12):
        world(size)
        check()
        check(elastic=True, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"])
        check(dataloader_type="single", cuda_graph_impl="none", step_batch_size_schedule=None)


def test_losses_of_multi_token_prediction_cannot_be_weighed_in_an_overlapped_schedule(world):
    world(3)
    check(mtp_num_layers=1)
    with pytest.raises(ConfigError, match="--overlap-moe-expert-parallel-comm with --mtp-num-lay"):
        check(mtp_num_layers=1, overlap_moe_expert_parallel_comm=True)


def test_a_batch_is_a_whole_number_of_microbatches(world):
    world(3)
    with pytest.raises(
        ConfigError, match=r"^--global-batch-size 9: must be a multiple of --micro-batch-size 2$"
    ):
        check(global_batch_size=9)
    with pytest.raises(
        ConfigError, match=r"^--eval-global-batch-size 4: must be a multiple of --eval-micro-batch-"
    ):
        check(eval_global_batch_size=4, eval_micro_batch_size=3)


def test_a_batch_that_may_shrink_is_megatrons(world):
    world(3)
    check(decrease_batch_size_if_needed=True, eval_global_batch_size=6, sft=True)


def test_the_evaluation_alone_may_not_fit(world):
    world(4)
    with pytest.raises(ConfigError, match="--sft True with --eval-global-batch-size 6 on 4 data-p"):
        check(eval_global_batch_size=6, sft=True)


@pytest.mark.parametrize(
    ("size", "changes", "padded", "batch"),
    [
        (4, {}, None, None),
        (3, {}, 12, 8),
        (3, {"eval_global_batch_size": 6}, 6, None),
        (4, {"eval_global_batch_size": 6, "eval_micro_batch_size": 1}, 8, 6),
        (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}, None, None),
        (6, {"pipeline_model_parallel_size": 2}, 12, 8),
        (3, {"global_batch_size": None}, None, None),
        (3, {"micro_batch_size": None}, None, None),
    ],
)
def test_megatrons_validation_gets_an_evaluation_that_fits(world, size, changes, padded, batch):
    world(size)
    args = Namespace(**(ARGS | changes))
    before = args.eval_global_batch_size
    assert uneven_arguments.pad_evaluation(args) == batch
    assert args.eval_global_batch_size == (padded if batch else before)


def test_interleaved_schedules_are_seen_before_and_after_the_validation():
    def found(**flags):
        return uneven_arguments.interleaving(Namespace(pipeline_model_parallel_size=4, **flags))

    assert found() == (1, 1)
    assert found(num_layers_per_virtual_pipeline_stage=2) == (4, 4)
    assert found(virtual_pipeline_model_parallel_size=2) == (4, 4)
    assert found(num_virtual_stages_per_pipeline_rank=2, microbatch_group_size_per_vp_stage=6) == (
        4,
        6,
    )
    args = Namespace(**(ARGS | {"pipeline_model_parallel_size": 1}))
    assert uneven_arguments.interleaving(args) == (1, 1)
    assert uneven_arguments.training_layout(args) == Microbatches(8, 2, 1)


def elastic(**changes):
    args = Namespace(**(ARGS | changes))
    elastic_arguments.adapt(args)
    return args.expert_model_parallel_size, args.resilient_slots_per_rank


def test_a_run_is_elastic_where_a_coordinator_is_named(world, monkeypatch):
    assert not elastic_arguments.is_elastic()
    monkeypatch.setenv(elastic_arguments.COORDINATOR, "localhost:1")
    assert elastic_arguments.is_elastic()


@pytest.mark.parametrize(
    ("size", "changes", "layout"),
    [
        (4, {}, (4, 2)),
        (3, {}, (3, 3)),
        (1, {}, (1, 8)),
        (12, {}, (12, 1)),
        (3, {"resilient_slots_per_rank": 5}, (3, 5)),
        (3, {"resilient_slots_per_rank": 20}, (3, 8)),
        (6, {"pipeline_model_parallel_size": 2}, (3, 3)),
        (6, {"tensor_model_parallel_size": 2}, (6, 2)),
        (6, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None}, (3, 3)),
        (3, {"num_experts": None}, (1, 0)),
    ],
)
def test_the_layout_of_experts_follows_the_world(world, size, changes, layout):
    world(size)
    assert elastic(**changes) == layout


def test_what_differs_from_what_was_asked_is_said_once(world, monkeypatch, capsys):
    world(3)
    elastic(expert_model_parallel_size=4, resilient_slots_per_rank=2)
    assert capsys.readouterr().out == (
        "elastic run of 3 ranks: --expert-model-parallel-size 3 (asked for: 4), "
        "--resilient-slots-per-rank 3 (asked for: 2)\n"
    )
    elastic(expert_model_parallel_size=3, resilient_slots_per_rank=3)
    monkeypatch.setenv("RANK", "1")
    elastic(expert_model_parallel_size=4)
    assert capsys.readouterr().out == ""


def test_slots_that_the_world_needs_may_be_too_many_for_the_memory(world):
    world(2)
    args = Namespace(**(ARGS | {"resilient_slots_per_rank": 2}))
    elastic_arguments.adapt(args)
    slots = args.resilient_slots_per_rank
    limit = 3 * sum(replica_arguments.slot_bytes(args).values()) * 4 / replica_arguments.GIB
    with pytest.raises(ConfigError, match=r"slots-per-rank 4 needs .* GiB a rank, .* 3 slots fit"):
        replica_arguments.check(args, ReplicaConfig(slots_per_rank=slots, max_expert_gib=limit))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": None}, "^--global-batch-size is missing: "),
        ({"decrease_batch_size_if_needed": True}, "^--decrease-batch-size-if-needed: "),
    ],
)
def test_an_elastic_runs_batch_does_not_depend_on_the_world(world, changes, message):
    with pytest.raises(ConfigError, match=message):
        elastic(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer True in an"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp True in an elastic run: its shards"),
        ({"optimizer": "muon"}, "--optimizer muon in an elastic run: only Adam's and SGD's"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1 in an elastic run: experts of"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
    ],
)
def test_what_cannot_be_refilled_is_refused(world, changes, message):
    world(4)
    with pytest.raises(ConfigError, match=message):
        elastic(**changes)
