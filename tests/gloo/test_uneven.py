"""Worlds that do not divide the batch train as those that do: losses, gradients, counts, samples.

Equal here is equal up to the order of float sums. The worlds that are compared to are stock
Megatron's: no microbatch of theirs is empty.
"""

import re

import pytest

from tests.support.layouts import PP2, TP2, VPP2
from tests.support.pretrain_pool import TINY
from tests.support.telemetry import events_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROBE = "tests.support.uneven_probe"
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DISTOPT = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
# Large enough that a wrong weight shows in the gradients of every layer.
AUXILIARY = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
SEQUENCE = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.1),
    "moe_z_loss_coeff": 0.01,
}
SIGMOID = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
MOE_FLAGS = (
    "num_experts",
    "moe_router_topk",
    "moe_token_dispatcher_type",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
)
RUN = TINY | {"global_batch_size": 8, "log_interval": 1, "resilient_expert_load_interval": 5}

# Ranks, ranks that it is compared to, flags, flags of the comparison alone.
CASES = {
    "three ranks of one": (3, 1, AUXILIARY, {}),
    "losses per sequence, two samples each": (3, 2, SEQUENCE | {"micro_batch_size": 2}, {}),
    "loss per token": (3, 1, AUXILIARY | {"calculate_per_token_loss": True}, {}),
    "expert bias, allgather": (
        3,
        1,
        SIGMOID | {"moe_token_dispatcher_type": "allgather", "inspect": f"{PROBE}:expert_biases"},
        {},
    ),
    "fewer microbatches than ranks": (3, 1, AUXILIARY | {"global_batch_size": 2}, {}),
    "distributed optimizer, shared experts": (
        3,
        1,
        AUXILIARY
        | DISTOPT
        | {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
        {},
    ),
    "multi-token prediction": (3, 1, AUXILIARY | {"mtp_num_layers": 1}, {}),
    "TP2": (4, 2, AUXILIARY | TP2 | {"global_batch_size": 5}, {}),
    "PP2 recompute": (4, 2, AUXILIARY | PP2 | RECOMPUTE | {"global_batch_size": 7}, {}),
    "VPP2 recompute": (
        4,
        2,
        AUXILIARY | VPP2 | RECOMPUTE | {"global_batch_size": 5},
        # Two stages in groups of two would need an empty microbatch in this world too.
        {"microbatch_group_size_per_virtual_pipeline_stage": 5},
    ),
    "dense, read by workers": (3, 1, dict.fromkeys(MOE_FLAGS) | {"num_workers": 1}, {}),
}


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def logged(result, name):
    """What Megatron's log says of `name`, step by step."""
    return [float(x) for x in re.findall(rf" {name}: +(\S+) \|", result.outputs[-1])]


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_a_world_that_fits(pools, name, tmp_path):
    ranks, other_ranks, flags, of_the_other = CASES[name]
    runs = []
    for folder, world, more in (("ours", ranks, {}), ("theirs", other_ranks, of_the_other)):
        own = {"resilient_run_dir": str(tmp_path / folder)}
        runs.append(pools.plugin.run(world, **(RUN | flags | more | own)).ok())
    ours, theirs = runs
    assert relative(ours.losses, theirs.losses) < 1e-5
    assert relative(ours.grad_norms, theirs.grad_norms) < 1e-5
    for log in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", "mtp_1 loss"):
        assert logged(ours, log) == pytest.approx(logged(theirs, log), rel=1e-5)
    for log in ("consumed samples", "learning rate"):
        assert len(logged(theirs, log)) == 10
        assert logged(ours, log) == logged(theirs, log)
    assert logged(ours, "consumed samples")[-1] == 10 * flags.get("global_batch_size", 8)
    loads = [
        sorted(
            (event["step"], event["layer"], event["tokens"])
            for event in events_of(run, "expert_load")
        )
        for run in (tmp_path / "ours", tmp_path / "theirs")
    ]
    assert loads[0] == loads[1]
    if flags.get("inspect"):
        assert ours.inspected[0] == theirs.inspected[0] != []


def test_replicas_on_three_ranks(pools, tmp_path):
    base = RUN | AUXILIARY | {"resilient_run_dir": str(tmp_path / "run")}
    checkpoint = str(tmp_path / "checkpoint")
    pools.plugin.run(2, **base, save=checkpoint, save_interval=2, exit_interval=2)
    # Initial weights depend on the expert-parallel size: both go on from one checkpoint.
    again = base | {"load": checkpoint}
    replicas = {
        "expert_model_parallel_size": 3,
        "resilient_slots_per_rank": 4,
        "resilient_ranks_per_node": 1,
        "resilient_rebalance_interval": 3,
        "resilient_rebalance_threshold": 0,
        "resilient_check_replicas_interval": 3,
    }
    theirs = pools.plugin.run(2, **again).ok()
    ours = pools.plugin.run(3, **again, **replicas).ok()
    assert len(ours.losses) == 8
    assert relative(ours.losses, theirs.losses) < 1e-5
    assert relative(ours.grad_norms, theirs.grad_norms) < 1e-5
    assert logged(ours, "consumed samples") == logged(theirs, "consumed samples")


def test_one_forward_one_backward_overlap(pools, tmp_path):
    run = RUN | AUXILIARY | {"resilient_run_dir": str(tmp_path), "global_batch_size": 6}
    run |= {"expert_model_parallel_size": 4, "bf16": True, "train_iters": 5}
    plain = pools.plugin.run(**run).ok()
    overlapped = pools.plugin.run(**run, overlap_moe_expert_parallel_comm=True).ok()
    assert overlapped.numbers == plain.numbers


def test_evaluation_is_that_of_a_world_that_fits(pools, tmp_path):
    losses = []
    for world in (3, 2):
        folder = tmp_path / str(world)
        flags = {
            "resilient_run_dir": str(folder),
            "split": "80,10,10",
            "eval_iters": 3,
            "eval_interval": 2,
            "eval_global_batch_size": 4,
            "train_iters": 4,
        }
        pools.plugin.run(world, **(RUN | flags)).ok()
        losses.append([event["loss"]["lm loss"] for event in events_of(folder, "evaluation")])
    assert len(losses[0]) == 4  # steps 2 and 4, and at the end validation and test
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_goes_on_in_other_worlds(pools, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    base = RUN | AUXILIARY | {"resilient_run_dir": str(tmp_path / "run"), "train_iters": 8}
    undisturbed = pools.plugin.run(4, **base).ok()
    losses = []
    for world in (4, 3, 1, 3):
        load = {"load": checkpoint} if losses else {}
        stop = {"save": checkpoint, "save_interval": 2, "exit_interval": 2}
        part = pools.plugin.run(world, **base, **load, **stop)
        assert part.error is None
        losses += part.losses
    assert relative(losses, undisturbed.losses) < 1e-5


def test_where_the_world_fits_nothing_is_in_the_way(pools, tmp_path):
    run = RUN | {"resilient_run_dir": str(tmp_path), "inspect": f"{PROBE}:wrapped"}
    run |= {"train_iters": 4}
    ours = pools.plugin.run(**run).ok()
    theirs = pools.plugin.run(**run, without=["core.data-loader", "core.num-microbatches"]).ok()
    assert ours.numbers == theirs.numbers
    assert ours.inspected == theirs.inspected == [[]] * 4
    uneven = pools.plugin.run(3, **run).ok()
    assert uneven.inspected == [["forward", "preprocess"]] * 3


def test_what_depends_on_the_world_is_refused_where_it_does_not_fit(pools, tmp_path):
    run = RUN | {"resilient_run_dir": str(tmp_path), "train_iters": 1}
    globally = {"moe_router_load_balancing_type": "global_aux_loss"}
    pools.plugin.run(4, **(run | globally)).ok()
    refused = pools.plugin.run(3, **(run | globally))
    assert refused.error.startswith(
        "ConfigError: --moe-router-load-balancing-type global_aux_loss with --global-batch-size 8 "
        "on 3 data-parallel ranks: "
    )


@pytest.mark.parametrize("form", [2, 3])
def test_forms_of_a_loss_function(pools, form):
    (table,) = pools.plugin.call(f"{PROBE}:weigh", world=1, batch=5, ranks=3, form=form)
    rows = [row for rows in table for row in rows]
    # Megatron takes the mean over all six.
    assert sum(loss for loss, _, _ in rows) / 6 == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    assert table[2][1] == [0, 0 if form == 3 else None, {"one": 0, "two": [0, 0]}]
    assert [logged["two"] for _, _, logged in table[1]] == [[2, 4], [5, 4]]
    # One number is averaged over the microbatches of its rank: the real ones.
    means = [sum(logged["one"] for *_, logged in rows) / 2 for rows in table]
    assert means == pytest.approx([(1 + 4) / 2, (2 + 5) / 2, 3])


def test_a_loss_per_token_is_weighed_by_tokens_alone(pools):
    (table,) = pools.plugin.call(
        f"{PROBE}:weigh", world=1, batch=5, ranks=3, form=3, per_token=True
    )
    assert [(loss, tokens) for rows in table for loss, tokens, _ in rows] == [
        (1, 4),
        (4, 4),
        (2, 4),
        (5, 4),
        (3, 4),
        (0, 0),
    ]


def test_a_rank_without_microbatches_logs_what_it_ran(pools):
    (table,) = pools.plugin.call(f"{PROBE}:weigh", world=1, batch=1, ranks=2, form=2)
    assert table[1][0][0] == 0
    assert table[1][0][2] == {"one": 2, "two": [0, 0]}
