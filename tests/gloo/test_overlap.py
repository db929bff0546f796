"""Layers and training in chunks are those of stock Megatron, in any degrees and by any way."""

import pytest

from tests.support.layouts import DISTOPT_OVERLAPPED, EP2, EP4, ETP2, MOVING_REPLICAS
from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROBE = "tests.support.overlap_probe"
DEGREES = {"1, 1": ((1,), (1,)), "2, 3": ((2,), (3,)), "4, 2": ((4,), (2,))}


def cases(**options):
    return {
        name: {"forward": forward, "backward": backward, **options}
        for name, (forward, backward) in DEGREES.items()
    }


NODES = {"nodes": [0, 0, 1, 1]}
TRIED = {
    "EP4": {
        **cases(),
        "uneven": {"forward": (3, (0.2, 0.6, 0.2)), "backward": (2, (0.75, 0.25))},
        "hooks": cases(hooks=True)["2, 3"],
        "replicas": cases(slots=4)["2, 3"],
        "replicas, uncut": cases(slots=4)["1, 1"],
        "1d": cases(algorithm="1d", **NODES)["2, 3"],
        "2d": cases(algorithm="2d", **NODES)["2, 3"],
        "1d, uneven nodes": cases(algorithm="1d", nodes=[0, 0, 0, 1])["4, 2"],
        "2d, replicas": cases(algorithm="2d", slots=3, **NODES)["4, 2"],
    },
    "EP2": {"2d": cases(algorithm="2d", nodes=[0, 1, 0, 1])["2, 3"]},
    "EP2 ETP2": {
        **cases(),
        "scatter-first": {"forward": (3, None, "scatter-first"), "backward": (2,)},
        "largest-first": {"forward": (2,), "backward": (4, None, "largest-first")},
        "as listed": {
            "forward": (1,),
            "backward": (
                2,
                (0.3, 0.7),
                [["allgather", 0], ["reducescatter", 0], ["allgather", 1], ["reducescatter", 1]],
            ),
        },
        "replicas": cases(slots=6)["2, 3"],
        "2d": cases(algorithm="2d", nodes=[0, 0, 1, 1])["4, 2"],
    },
    "EP1": {"alone": cases()["2, 3"]},
}


@pytest.mark.parametrize("layout", TRIED)
def test_layers_are_stocks(pools, layout):
    for found in pools.plugin.call(f"{PROBE}:compare", layout=layout, cases=TRIED[layout]):
        for name, differences in found.items():
            assert max(differences.values()) < 1e-5, (name, differences)
        if layout == "EP4":
            assert set(found["1, 1"].values()) == {0.0}  # the same bits


def test_layers_in_bf16_differ_by_rounding(pools):
    tried = cases(dtype="bfloat16")
    for layout in ("EP4", "EP2 ETP2"):
        for found in pools.plugin.call(f"{PROBE}:compare", layout=layout, cases=tried):
            for name, differences in found.items():
                assert max(differences.values()) < 2e-2, (layout, name, differences)


def test_a_pass_says_what_it_did(pools):
    """Of the first microbatch: 32 tokens of each rank, sent to two experts each."""
    by_rank = pools.plugin.call(f"{PROBE}:report_passes")
    sent = {}
    for rank, told in enumerate(by_rank):
        assert told["windows"] == 3
        assert told["eval"] < 1e-6
        assert told["another plan"] < 1e-6
        for name, degree in (("forward", 2), ("backward", 3)):
            spans, units = told[name]
            lanes = {}
            for lane, stage, chunk, _ in sorted(spans, key=lambda span: span[3]):
                lanes.setdefault(lane, []).append((stage, chunk))
            window = [("gradient", 0)] * (name == "backward")
            assert lanes["compute"] == [("expert", chunk) for chunk in range(degree)]
            assert lanes["inter"] == [
                *(("dispatch", chunk) for chunk in range(degree)),
                *window,
                *(("combine", chunk) for chunk in range(degree)),
            ]
            amounts = {(stage, chunk): amount for stage, chunk, amount in units}
            assert amounts.keys() == {(stage, chunk) for _, stage, chunk, _ in spans}
            totals = {}
            for (stage, _), amount in amounts.items():
                totals[stage] = totals.get(stage, 0) + amount
            sent[rank, name] = totals
        assert sent[rank, "backward"]["gradient"] == 12.0
    row, packed = 16 * 4, 16 * 4 + 4
    for name, out, back in (("forward", packed, row), ("backward", row, packed)):
        totals = [sent[rank, name] for rank in range(4)]
        # All rows are gathered at both tensor-parallel ranks of one expert-parallel rank.
        assert sum(own["allgather"] for own in totals) == 2 * 4 * 32 * 2 * out
        assert sum(own["reducescatter"] for own in totals) == 2 * 4 * 32 * 2 * back
        flops = 2 * 16 * 8 * 3 * (1 if name == "forward" else 2)
        assert sum(own["expert"] for own in totals) == 4 * 32 * 2 * flops
        dispatched = sum(own["dispatch"] for own in totals) / out
        assert 0 < dispatched < 4 * 32 * 2
        assert sum(own["combine"] for own in totals) / back == dispatched


def test_nodes_that_a_loss_left_unlike_go_by_1d(pools):
    """1d has three hops, 2d two."""
    assert pools.plugin.call(f"{PROBE}:hops_of_2d", nodes=["0", "0", "1", "1"]) == [2] * 4
    assert pools.plugin.call(f"{PROBE}:hops_of_2d", nodes=["0", "0", "0", "1"]) == [3] * 4


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_an_error_in_an_expert_is_that_ranks_own(pools, during):
    found = pools.plugin.call(f"{PROBE}:break_an_expert", broken_rank=2, during=during)
    assert found[2][:2] == ["ExpertError", "no more"]
    assert found[2][2][0] == "in expert of chunk 1 on stream compute"
    assert all(found[rank][0] == "RuntimeError" for rank in (0, 1, 3))


SHARED = {"moe_shared_expert_intermediate_size": 64}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECOMPUTE_MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# One microbatch of four ranks; slow, because a token that rounding routes otherwise changes losses.
EP2_ETP2 = EP2 | ETP2 | {"global_batch_size": 4}
SLOW = {"lr": 1e-4, "min_lr": 1e-5}
FREE = TINY | {"moe_aux_loss_coeff": 0, "lr": 3e-3, "global_batch_size": 8}


def overlap(forward, backward, dispatch="direct", order="gather-first"):
    return {
        "resilient_overlap": "fixed",
        "resilient_overlap_degrees": [forward, backward],
        "resilient_overlap_order": order,
        "resilient_dispatch": dispatch,
    }


# Flags of both runs, and those of ours; steps.
TRAINED = {
    "EP4, uncut": (EP4, overlap(1, 1), 20),
    "EP4, distributed optimizer": (EP4 | DISTOPT_OVERLAPPED, overlap(2, 3), 50),
    "EP2 ETP2, shared experts": (
        EP2_ETP2 | SHARED | SLOW,
        overlap(4, 2, order="scatter-first"),
        20,
    ),
    "replicas, 2d": (EP4, MOVING_REPLICAS | overlap(4, 2, "2d"), 50),
    "2d, no chunks": (EP4, {"resilient_dispatch": "2d"}, 10),
    "EP2 ETP2, replicas": (
        EP2_ETP2 | SLOW,
        MOVING_REPLICAS | {"resilient_slots_per_rank": 6} | overlap(2, 3),
        10,
    ),
    "PP2 EP2, 1d, auxiliary loss": (
        EP2 | {"pipeline_model_parallel_size": 2, "moe_aux_loss_coeff": 0.01},
        overlap(2, 2, "1d"),
        10,
    ),
    "recompute": (EP4 | RECOMPUTE, overlap(2, 3), 10),
    "recompute moe": (EP4 | RECOMPUTE_MOE, overlap(4, 2), 10),
    "a gate that mixes": (
        EP4 | {"resilient_gate": "soft", "resilient_allow_lookahead_gates": True},
        overlap(2, 3),
        10,
    ),
    "expert-choice": (
        EP4 | {"resilient_gate": "expert-choice", "resilient_allow_lookahead_gates": True},
        overlap(3, 2),
        10,
    ),
    "gshard, capacity": (
        EP4 | {"resilient_gate": "gshard", "moe_expert_capacity_factor": 1.0},
        overlap(2, 3),
        10,
    ),
}


@pytest.fixture
def two_nodes(pools):
    pools.plugin.call(f"{PROBE}:set_node_map", nodes="0,0,1,1")
    yield
    pools.plugin.call(f"{PROBE}:set_node_map", nodes=None)


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_stock(pools, two_nodes, name, tmp_path):
    flags, ours, steps = TRAINED[name]
    run = FREE | flags | {"train_iters": steps, "resilient_run_dir": str(tmp_path)}
    stock = pools.plugin.run(**run).ok()
    found = pools.plugin.run(**(run | ours)).ok()
    assert stock.losses[-1] < stock.losses[0]
    if name == "EP4, uncut":
        assert found.numbers == stock.numbers
    assert relative(found.losses, stock.losses) < 1e-5
    assert relative(found.grad_norms, stock.grad_norms) < 1e-4


def test_bf16_training_differs_by_rounding_only(pools, tmp_path):
    run = FREE | EP4 | {"train_iters": 15, "resilient_run_dir": str(tmp_path)}
    exact = pools.plugin.run(**run).ok()
    stock = pools.plugin.run(**run, bf16=True).ok()
    ours = pools.plugin.run(**run, bf16=True, **overlap(2, 3)).ok()
    rounding = relative(stock.losses, exact.losses)
    assert 0 < relative(ours.losses, stock.losses) < 2 * rounding


def test_fp8_on_the_wire_is_rounded_once_whatever_the_chunks(pools, tmp_path):
    run = FREE | EP4 | {"train_iters": 5, "resilient_run_dir": str(tmp_path)}
    run |= {"resilient_wire_dtype": "fp8"}
    plain = pools.plugin.run(**run).ok()
    ours = pools.plugin.run(**run, **overlap(2, 3)).ok()
    assert relative(ours.losses, plain.losses) < 1e-5
