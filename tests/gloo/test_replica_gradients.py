"""Gradients of replicas that are summed in the backward pass have the bits of a sum after it."""

import pytest

from tests.gloo.test_replicas import FREE, PROBE, SIX_SLOTS
from tests.support.layouts import (
    DISTOPT_OVERLAPPED,
    EP2,
    EP4,
    MOVING_REPLICAS,
    RESHARDABLE,
    VPP2,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHORT = FREE | MOVING_REPLICAS | {"train_iters": 3, "resilient_rebalance_interval": 2}
# With three ranks Megatron scales gradients by a third: scaled and summed, or summed and scaled, is
# not the same in every bit.
EP3 = {"expert_model_parallel_size": 3, "world": 3}

CASES = {
    # Twelve slots on three ranks, two microbatches a rank; the layer whose experts complete
    # Megatron's bucket is scaled before it is summed, the other one later.
    "accumulation, distopt": (
        EP3 | RESHARDABLE | DISTOPT_OVERLAPPED | {"global_batch_size": 6, "clip_grad": 0.1},
        2,
    ),
    "empty microbatches, recompute": (
        EP3
        | {
            "global_batch_size": 4,
            "bf16": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        2,
    ),
    "VPP2": (
        VPP2 | EP2 | SIX_SLOTS | {"train_iters": 3},
        2,
    ),
    "experts without tokens": (
        EP4
        | {
            "moe_router_force_biased": 5.0,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
        },
        2,
    ),
}


@pytest.fixture
def sum_replicas(pools):
    """Says how the next runs sum; brings back what the program does."""

    def choose(**how):
        pools.plugin.call(f"{PROBE}:sum_replicas", **how)

    yield choose
    pools.plugin.call(f"{PROBE}:restore_sums")


@pytest.mark.parametrize("name", CASES)
def test_sums_begin_early_and_are_those_of_late_ones(pools, sum_replicas, name, tmp_path):
    flags, buckets = CASES[name]
    run = SHORT | flags | {"resilient_run_dir": str(tmp_path), "inspect": f"{PROBE}:early_sums"}
    sum_replicas(early=False)
    late = pools.plugin.run(**run).ok()
    sum_replicas()
    early = pools.plugin.run(**run).ok()
    assert early.numbers == late.numbers
    assert [found[1:] for found in early.inspected] == [found[1:] for found in late.inspected]
    assert [found[0] for found in early.inspected] == [buckets] * len(early.inspected)
    assert [found[0] for found in late.inspected] == [0] * len(late.inspected)
    if name == "experts without tokens":
        assert sum(found[1] for found in early.inspected) > 0


def test_weights_are_complete_before_inputs(pools):
    cases = [
        {"tokens": tokens, "topk": topk, "recompute": recompute}
        for tokens in (1, 30)
        for topk in (1, 8)
        for recompute in (False, True)
    ]
    for by_case in pools.plugin.call(f"{PROBE}:each", probe="order_in_backward", cases=cases):
        for case, order in zip(cases, by_case, strict=True):
            assert order.index("input") == len(order) - 1, case
            assert len(order) > 1, case


def test_a_backward_pass_that_is_cut_short_leaves_no_sum_behind(pools, sum_replicas, tmp_path):
    run = SHORT | EP4 | {"resilient_run_dir": str(tmp_path)}
    sum_replicas(broken_rank=2)
    assert "no exchange from here" in pools.plugin.run(**run).error
    assert pools.plugin.call(f"{PROBE}:sums_alive") == [0] * 4
    sum_replicas()
    pools.plugin.run(**run).ok()
    assert pools.plugin.call(f"{PROBE}:sums_alive") == [0] * 4
