"""Training with replicas is stock training: the same layers, gradients, losses and weights."""

import pytest

from tests.support.layouts import (
    DISTOPT_OVERLAPPED,
    EP2,
    EP4,
    ETP2,
    MOVING_REPLICAS,
    PP2,
    RESHARDABLE,
    TP2,
    VPP2,
)
from tests.support.pretrain_pool import TINY
from tests.support.telemetry import events_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROBE = "tests.support.replica_probe"
WEIGHTS = f"{PROBE}:logical_weights"
SIX_SLOTS = MOVING_REPLICAS | {"resilient_slots_per_rank": 6}
# No auxiliary loss: routers may become as lopsided as they like.
FREE = TINY | {"moe_aux_loss_coeff": 0, "lr": 3e-3}

CASES = {
    "EP4": (EP4, MOVING_REPLICAS),
    "EP4 distopt": (EP4 | RESHARDABLE | DISTOPT_OVERLAPPED, MOVING_REPLICAS),
    "EP2": (EP2, SIX_SLOTS),
    "TP2 EP2": (TP2 | EP2, SIX_SLOTS),
    "TP2 EP4": (TP2 | EP4, MOVING_REPLICAS),
    "TP2 EP2 ETP2": (ETP2 | EP2, SIX_SLOTS),
    "PP2 EP2": (PP2 | EP2, SIX_SLOTS),
    "PP2 EP2 distopt": (PP2 | EP2 | RESHARDABLE | DISTOPT_OVERLAPPED, SIX_SLOTS),
    "VPP2 EP2": (
        VPP2 | EP2,
        SIX_SLOTS,
    ),
    "clipping, accumulation, loss per token": (
        EP4 | {"clip_grad": 0.1, "global_batch_size": 8, "calculate_per_token_loss": True},
        MOVING_REPLICAS,
    ),
    "auxiliary losses": (
        EP4 | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
        MOVING_REPLICAS,
    ),
    "allgather": (EP4 | {"moe_token_dispatcher_type": "allgather"}, MOVING_REPLICAS),
    "shared experts": (
        EP4 | {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
        MOVING_REPLICAS,
    ),
    "recompute": (
        EP4
        | {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        MOVING_REPLICAS,
    ),
    "top 8": (EP4 | {"moe_router_topk": 8}, MOVING_REPLICAS),
}

FIFTY_STEPS = ("EP4", "EP4 distopt", "EP2", "TP2 EP2", "PP2 EP2", "PP2 EP2 distopt", "VPP2 EP2")


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def weights(result):
    """{(layer, kind, expert): (magnitude, projection)}; replicas must agree to the last bit."""
    table = {}
    for rows in result.inspected:
        for layer, kind, expert, *numbers in rows:
            assert table.setdefault((layer, kind, expert), numbers) == numbers
    return table


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_stock(pools, name, tmp_path):
    flags, replicas = CASES[name]
    steps = 50 if name in FIFTY_STEPS else 20
    run = FREE | flags | {"train_iters": steps, "resilient_run_dir": str(tmp_path)}
    run["inspect"] = WEIGHTS
    stock = pools.plugin.run(**run).ok()
    ours = pools.plugin.run(**(run | replicas)).ok()
    assert stock.losses[-1] < stock.losses[0]
    assert relative(ours.grad_norms, stock.grad_norms) < 1e-4
    assert relative(ours.losses, stock.losses) < 1e-5
    expected, found = {}, weights(ours)
    for rows in stock.inspected:
        expected |= {(layer, kind, expert): n for layer, kind, expert, *n in rows}
    assert found.keys() == expected.keys()
    for key, (magnitude, projection) in expected.items():
        assert found[key][0] == pytest.approx(magnitude, rel=1e-5)
        assert found[key][1] == pytest.approx(projection, abs=1e-5 * magnitude)
    moves = events_of(tmp_path, "rebalance")
    assert len(moves) == steps // 5
    if name != "top 8":  # where every expert has every token there is nothing to move
        assert sum(move["bytes"] for move in moves) > 0


def test_bf16_differs_by_rounding_only(pools, tmp_path):
    run = FREE | EP4 | {"train_iters": 30, "resilient_run_dir": str(tmp_path)}
    exact = pools.plugin.run(**run).ok()
    stock = pools.plugin.run(**run, bf16=True).ok()
    ours = pools.plugin.run(**run, **MOVING_REPLICAS, bf16=True).ok()
    rounding = relative(stock.losses, exact.losses)
    assert 0 < relative(ours.losses, stock.losses) < 2 * rounding


def test_one_forward_one_backward_overlap(pools, tmp_path):
    run = FREE | EP4 | MOVING_REPLICAS | {"bf16": True, "resilient_run_dir": str(tmp_path)}
    plain = pools.plugin.run(**run).ok()
    overlapped = pools.plugin.run(**run, overlap_moe_expert_parallel_comm=True).ok()
    assert overlapped.numbers == plain.numbers


@pytest.mark.parametrize(
    ("experts", "flags"),
    [(6, {}), (1, {"moe_router_topk": 1, "moe_router_pre_softmax": True, "slots": 1})],
)
def test_experts_need_not_divide_among_ranks(pools, tmp_path, experts, flags):
    slots = {"resilient_slots_per_rank": flags.pop("slots", 4)}
    run = FREE | EP4 | flags | {"num_experts": experts, "resilient_run_dir": str(tmp_path)}
    ours = pools.plugin.run(**(run | MOVING_REPLICAS | slots)).ok()
    alone = pools.plugin.run(**(run | {"expert_model_parallel_size": 1})).ok()
    assert ours.losses[-1] < ours.losses[0]
    # The initial weights of experts depend on EP, those of all else do not.
    assert relative(ours.losses[:1], alone.losses[:1]) < 0.02


def probed(pools, function, cases):
    """Calls a probe for each case; yields (case, what one rank answered)."""
    answers = pools.plugin.call(f"{PROBE}:each", probe=function, cases=cases)
    for by_case in answers:
        yield from zip(cases, by_case, strict=True)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_layers_are_stocks_over_random_placements_and_loads(pools, dispatcher):
    cases = [
        {"seed": seed, "tokens": tokens, "topk": topk, "dispatcher": dispatcher}
        for seed in range(4)
        for tokens in (1, 3, 40)
        for topk in (1, 2, 8)
    ]
    for case, found in probed(pools, "compare_layers", cases):
        assert max(found.values()) < 1e-5, (case, found)


def test_without_use_of_replicas_a_layer_is_bitwise_stocks(pools):
    cases = [{"seed": seed, "tokens": 20, "first_slot_only": True} for seed in range(3)]
    for case, found in probed(pools, "compare_layers", cases):
        assert set(found.values()) == {0.0}, (case, found)


def test_sums_over_replicas(pools):
    cases = [{"seed": seed} for seed in range(20)]
    for case, (error, same_bits) in probed(pools, "sum_over_replicas", cases):
        assert error < 1e-12, case
        assert same_bits, case


def test_experts_move(pools):
    cases = [{"seed": seed} for seed in range(20)]
    for case, arrived in probed(pools, "move_experts", cases):
        assert arrived, case


def test_a_router_of_nan_refuses_the_step_on_every_rank(pools):
    for _, said in probed(pools, "refuse_nan", [{}]):
        assert said.startswith("layer 3: NaN or infinite router probabilities on ranks [1]")


def test_any_dispatcher_sees_slots_as_experts(pools):
    for _, (routing_map, probs, dtype, slots_of_token) in probed(
        pools, "what_the_dispatcher_sees", [{}]
    ):
        assert routing_map == probs == [6, 16]
        assert dtype == "torch.bool"
        assert slots_of_token == [2] * 6


def test_a_replica_that_differs_is_named(pools, tmp_path):
    run = FREE | EP4 | MOVING_REPLICAS | {"train_iters": 2, "resilient_run_dir": str(tmp_path)}
    result = pools.plugin.run(**run, inspect=f"{PROBE}:corrupt_a_replica").ok()
    for (layer, expert), said in result.inspected:
        assert said.startswith(f"layer {layer}, expert {expert}: replicas differ between ranks")
        assert "[3]" in said


def test_a_resumed_run_has_the_placement_of_the_saved_one(pools, tmp_path):
    run = FREE | EP4 | MOVING_REPLICAS | {"resilient_run_dir": str(tmp_path / "run")}
    whole = pools.plugin.run(**run).ok().numbers
    folder = str(tmp_path / "checkpoints")
    pools.plugin.run(**run, save=folder, save_interval=5, exit_interval=5)
    (placement,) = (tmp_path / "checkpoints" / "iter_0000005").glob("resilient_placement.*.json")
    assert pools.plugin.run(**run, load=folder).ok().numbers == whole[5:]
    placement.write_text("{")
    assert "is damaged" in pools.plugin.run(**run, load=folder).error
    placement.unlink()
    assert relative(pools.plugin.run(**run, load=folder).losses, [n for n, _ in whole[5:]]) < 1e-5


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_checkpoints_are_stocks_both_ways(pools, tmp_path, optimizer):
    base = FREE | {"resilient_run_dir": str(tmp_path / "run")}
    if optimizer == "distributed":
        base |= RESHARDABLE | DISTOPT_OVERLAPPED
    often = MOVING_REPLICAS | {"resilient_rebalance_interval": 2}
    whole = pools.plugin.run(**base, **EP4).ok().losses
    for name, flags in {"replicas": often, "stock": {}}.items():
        folder = str(tmp_path / name)
        pools.plugin.run(**base, **EP4, **flags, save=folder, save_interval=5, exit_interval=5)
        layouts = {"stock": EP4, "replicas": EP4 | often, "stock EP2": EP2}
        if optimizer == "plain":
            layouts["replicas EP2"] = EP2 | often | {"resilient_slots_per_rank": 5}
        for other, layout in layouts.items():
            resumed = pools.plugin.run(**base, **layout, load=folder).ok()
            assert relative(resumed.losses, whole[5:]) < 1e-5, (name, other)
