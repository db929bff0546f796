"""Gradients that are sent in windows of the backward pass are those that Megatron reduces alone."""

import pytest

from tests.gloo.test_replicas import FREE, SIX_SLOTS, relative
from tests.support.layouts import DISTOPT, EP2, EP4, MOVING_REPLICAS, TP2, VPP2

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROBE = "tests.support.slices_probe"
# Neither a whole layer nor a whole buffer: slices are cut, and something is left.
SOME = {"in_moe": 50_000, "beside_dense": 30_000}
ALL = {"in_moe": 1 << 30}
TWO = {"world": 2}

# flags, windows, whether the bits are those of Megatron alone: of two ranks they are, since a sum
# of two has one order only.
CASES = {
    "two ranks": (TWO, SOME, True),
    "bf16 reduced in fp32, two microbatches": (
        TWO | {"bf16": True, "global_batch_size": 4, "accumulate_allreduce_grads_in_fp32": True},
        SOME,
        True,
    ),
    "bf16, distopt": (TWO | DISTOPT | {"bf16": True, "grad_reduce_in_bf16": True}, SOME, True),
    "distopt, recompute, tied embedding, clipping": (
        TWO
        | DISTOPT
        | {
            "untie_embeddings_and_output_weights": None,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "clip_grad": 0.1,
        },
        ALL,
        True,
    ),
    "EP2 DP2": (EP2, ALL, False),
    "EP4 distopt, replicas": (EP4 | DISTOPT | MOVING_REPLICAS, SOME, False),
    "TP2 EP2, loss per token": (TP2 | EP2 | {"calculate_per_token_loss": True}, SOME, True),
    "VPP2 EP2, six slots": (
        VPP2 | EP2 | SIX_SLOTS,
        SOME,
        True,
    ),
}


@pytest.fixture
def probe(pools):
    """Calls a function of the probe on all ranks; brings back what the program does."""

    def call(function, **how):
        return pools.plugin.call(f"{PROBE}:{function}", **how)

    yield call
    pools.plugin.call(f"{PROBE}:restore")


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_without_slices(pools, probe, name, tmp_path):
    flags, windows, same_bits = CASES[name]
    run = FREE | {"num_layers": 3, "seq_length": 32, "train_iters": 20} | flags
    run |= {"resilient_run_dir": str(tmp_path), "inspect": f"{PROBE}:weights_and_bytes"}
    alone = pools.plugin.run(**run).ok()
    probe("slice_gradients", **windows)
    sliced = pools.plugin.run(**run).ok()
    if same_bits:
        assert sliced.numbers == alone.numbers
        assert [f[0] for f in sliced.inspected] == [f[0] for f in alone.inspected]
    else:
        assert relative(sliced.losses, alone.losses) < 1e-5
        assert relative(sliced.grad_norms, alone.grad_norms) < 1e-4
    for (_, none, _), (_, some, dense) in zip(alone.inspected, sliced.inspected, strict=True):
        assert none == 0
        assert 0 < some < dense


def test_replicas_can_be_summed_in_the_windows(pools, probe, tmp_path):
    run = FREE | EP4 | MOVING_REPLICAS | {"num_layers": 3, "seq_length": 32, "train_iters": 6}
    run |= {"resilient_run_dir": str(tmp_path), "inspect": "tests.support.replica_probe:early_sums"}
    pools.plugin.call("tests.support.replica_probe:sum_replicas")  # a bucket for each layer
    try:
        alone = pools.plugin.run(**run).ok()
        probe("slice_gradients", replicas=True)
        windows = pools.plugin.run(**run).ok()
    finally:
        pools.plugin.call("tests.support.replica_probe:restore_sums")
    assert windows.numbers == alone.numbers
    # The lowest layer has no window below it.
    assert [found[0] for found in alone.inspected] == [3] * 4
    assert [found[0] for found in windows.inspected] == [2] * 4
    assert [found[1:] for found in windows.inspected] == [found[1:] for found in alone.inspected]


def test_a_failure_in_a_window_passes_through_and_leaves_nothing(pools, probe, tmp_path):
    run = FREE | TWO | {"train_iters": 2, "resilient_run_dir": str(tmp_path)}
    probe("slice_gradients", **SOME, broken=True)
    assert "no slice from here" in pools.plugin.run(**run).error
    probe("slice_gradients", **SOME)
    assert pools.plugin.call(f"{PROBE}:slices_alive") == [0] * 4
    pools.plugin.run(**run).ok()
    assert pools.plugin.call(f"{PROBE}:slices_alive") == [0] * 4


def test_a_gradient_that_was_not_final_is_an_error(pools, probe, tmp_path):
    run = FREE | TWO | {"train_iters": 1, "resilient_run_dir": str(tmp_path)}
    probe("slice_gradients", **ALL, wrong=True)
    assert "added to after it had been sent" in pools.plugin.run(**run).error


def test_nan_is_found_where_it_was_made(pools, probe, tmp_path):
    run = FREE | TWO | {"resilient_run_dir": str(tmp_path)}
    run |= {"rerun_mode": "disabled", "train_iters": 1}
    probe("slice_gradients", **ALL)
    probe("spoil_a_gradient", rank=1)
    pools.plugin.run(**run).ok()
    nothing, own = pools.plugin.call(f"{PROBE}:found", world=2)
    assert nothing == []
    assert len(own) == 1
    assert "found NaN in local grad norm for bucket #0" in own[0]


def test_overlap_of_megatron_is_refused(pools, probe, tmp_path):
    run = FREE | TWO | {"train_iters": 1, "resilient_run_dir": str(tmp_path)}
    probe("slice_gradients", **SOME)
    assert "no gradient slices with --overlap-grad-reduce: Megatron then" in (
        pools.plugin.run(**run, overlap_grad_reduce=True).error
    )


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranges_are_summed_where_they_are_kept(pools, probe, ranks):
    for errors in probe("sum_ranges", world=ranks, seed=ranks, ranks=ranks):
        assert max(errors) < 1e-12
