"""Every parallel layout and kind of MoE model that the CPU backend trains, and what must be equal.

Bitwise equal can be what adds the same numbers in the same order. The distributed optimizer
reduces and scatters where the plain one all-reduces: one order for two data-parallel ranks, two
for four. It also sums the norm of gradients in another order, so that nothing is clipped here.
"""

import json

import pytest

from tests.support.layouts import DISTOPT, EP2, EP4, ETP2, PP2, TP2, VPP2
from tests.support.layouts import DISTOPT_OVERLAPPED as OVERLAPPED
from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
BF16 = {"bf16": True}
SHARED = {"moe_shared_expert_intermediate_size": 128}
SPEC = {"spec": ("tests.support.specs", "own_layer_spec")}

# Flags, and what changes nothing in the losses.
PAIRS = {
    "EP4 allgather": (EP4, ALLGATHER),
    "TP2 EP2 distopt": (TP2 | EP2, DISTOPT),
    "TP2 EP4 allgather": (TP2 | EP4, ALLGATHER),
    "PP2 EP2 distopt": (PP2 | EP2, DISTOPT),
    "TP2 PP2 EP2 distopt": (TP2 | PP2 | EP2, DISTOPT),
    "VPP2 EP2 overlap": (VPP2 | EP2, OVERLAPPED),
    "ETP2 TP2 EP2 allgather": (ETP2 | EP2, ALLGATHER),
    "spec": (EP2, SPEC),
    "bf16 1F1B overlap": (EP4 | BF16, {"overlap_moe_expert_parallel_comm": True}),
}
LAYOUTS_OF_FOUR = {"EP2": EP2, "EP4": EP4}

MODELS = {
    "mixtral": EP4
    | {
        "group_query_attention": True,
        "num_query_groups": 2,
        "moe_ffn_hidden_size": 256,
    },
    "deepseek": EP2
    | SHARED
    | {
        "num_layers": 4,
        "moe_layer_freq": "([0]+[1]*3)",
        "num_experts": 16,
        "moe_ffn_hidden_size": 64,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
    },
    "qwen": EP4
    | {
        "num_experts": 32,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 32,
        "qk_layernorm": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 32,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 1e-3,
    },
}


class Runs:
    """Runs of the small model; each configuration is run once in this module."""

    def __init__(self, pools):
        self._pools, self._done = pools, {}

    def __call__(self, configuration, world=4):
        key = json.dumps([configuration, world], sort_keys=True)
        if key not in self._done:
            model = TINY | {"train_iters": 8, "lr": 3e-3, "clip_grad": 0}
            self._done[key] = self._pools.plugin.run(
                world,
                **(model | configuration),
                inspect="tests.support.specs:moe_layer_classes",
            ).ok()
            assert_learns(self._done[key])
        return self._done[key]


@pytest.fixture(scope="module")
def runs(pools):
    return Runs(pools)


def assert_learns(result):
    assert len(result.losses) == 8
    assert result.losses[-1] < result.losses[0] - 0.3, result.losses


@pytest.mark.parametrize("name", PAIRS)
def test_losses_are_bitwise_equal(runs, name):
    base, change = PAIRS[name]
    one, other = runs(base), runs(base | change)
    assert other.losses == one.losses
    assert other.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)


def test_two_data_parallel_ranks_and_their_optimizers_are_bitwise_equal(runs):
    plain, *others = [runs(EP2 | optimizer, world=2) for optimizer in ({}, DISTOPT, OVERLAPPED)]
    assert [other.losses for other in others] == [plain.losses] * 2


def test_shared_experts_and_their_overlap(runs):
    """The overlap adds the gradients of the shared and the routed experts in another order."""
    plain, overlap = runs(EP2 | SHARED), runs(EP2 | SHARED | {"moe_shared_expert_overlap": True})
    assert overlap.losses[0] == plain.losses[0]
    assert overlap.losses == pytest.approx(plain.losses, rel=1e-6)
    assert overlap.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS_OF_FOUR)
def test_four_data_parallel_ranks_and_their_optimizers(runs, name):
    layout = LAYOUTS_OF_FOUR[name]
    plain, distopt, overlap = [runs(layout | change) for change in ({}, DISTOPT, OVERLAPPED)]
    assert overlap.losses == distopt.losses
    assert distopt.losses == pytest.approx(plain.losses, rel=1e-6)
    assert distopt.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_model_learns(runs, name):
    runs(MODELS[name])


def test_spec_is_passed_through(runs):
    assert runs(EP2).inspected == [["MoELayer"]] * 4
    assert runs(EP2 | SPEC).inspected == [["OwnMoELayer"]] * 4


# Layout: number of ranks, flags.
LAYOUTS = {
    "EP2 of 2 ranks": (2, EP2),
    "DP4": (4, {}),
    "EP2": (4, EP2),
    "EP4": (4, EP4 | DISTOPT),
    "TP2 EP2": (4, TP2 | EP2),
    "ETP2 EP2": (4, ETP2 | EP2),
    "PP2 EP2": (4, PP2 | EP2),
    "VPP2 EP2": (4, VPP2 | EP2),
    "TP2 PP2 EP2": (4, TP2 | PP2 | EP2 | DISTOPT),
}


class Weights:
    """Two steps of one process, and of others from the same weights on the same data."""

    def __init__(self, pools, folder):
        self._pools = pools
        model = TINY | {"num_layers": 4}
        pools.plugin.run(1, **model, train_iters=1, save=folder, save_interval=1).ok()
        self._model = model | {"train_iters": 2, "load": folder, "finetune": True}
        self.of_one_process = self.run(1)

    def run(self, world, **layout):
        return self._pools.plugin.run(world, **(self._model | layout)).ok()


@pytest.fixture(scope="module")
def weights(pools, tmp_path_factory):
    return Weights(pools, str(tmp_path_factory.mktemp("weights")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_compute_the_same(weights, name):
    """Same weights, same batch: what differs is the order of sums in fp32."""
    world, layout = LAYOUTS[name]
    result, expected = weights.run(world, **layout), weights.of_one_process
    assert result.losses == pytest.approx(expected.losses, rel=2e-6)
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
