"""Every gate trains, and is the same in every layout; hooks see and change what passes."""

import pytest

from megatron_resilient.config import GATES
from tests.support.layouts import EP2, EP4, TP2
from tests.support.pretrain_pool import TINY
from tests.support.telemetry import events_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PROBE = "tests.support.gate_probe"
OURS = tuple(gate for gate in GATES if gate != "megatron")
LOOKAHEAD = ("expert-choice", "soft")
REPLICAS = {"resilient_slots_per_rank": 4, "resilient_ranks_per_node": 1}
RUN = TINY | {"num_layers": 1, "lr": 3e-3, "train_iters": 6, "inspect": f"{PROBE}:router_weights"}


def flags(gate):
    if gate in LOOKAHEAD:
        return {
            "resilient_gate": gate,
            "resilient_allow_lookahead_gates": True,
            "moe_aux_loss_coeff": 0,
        }
    return {"resilient_gate": gate}


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("gate", [gate for gate in OURS if gate != "xmoe"])
def test_every_gate_trains(pools, tmp_path, gate):
    options = RUN | EP4 | flags(gate) | {"resilient_expert_load_interval": 6}
    run = pools.plugin.run(**options, resilient_run_dir=tmp_path).ok()
    assert run.losses[-1] < run.losses[0] - 0.3
    assert all(weights == run.inspected[0] for weights in run.inspected)
    (event,) = events_of(tmp_path, "expert_load")
    total = sum(event["tokens"])
    tokens = RUN["train_iters"] * RUN["global_batch_size"] * RUN["seq_length"]
    if gate == "soft":  # each token's answer counts once, whoever has which share of it
        assert total == pytest.approx(tokens, abs=4)
    else:
        assert total == 2 * tokens
        assert (len(set(event["tokens"])) == 1) == (gate == "expert-choice")


def test_a_gate_is_the_same_in_every_layout_and_with_replicas(pools):
    by_rank = pools.plugin.call(f"{PROBE}:layer_losses", gates=OURS)
    for gate, results in by_rank[0].items():
        losses, gradients, tokens = results["EP4"]
        assert losses[1] < losses[0]
        trained = [name for name in gradients if name != "noise_weight"]
        assert all(gradients[name] > 1e-3 for name in trained)
        for layout, (others, other_gradients, other_tokens) in results.items():
            assert relative(others, losses) < 1e-5, (gate, layout)
            for name in trained:
                expected = pytest.approx(gradients[name], rel=1e-5)
                assert other_gradients[name] == expected, (gate, layout, name)
            assert other_tokens == tokens, (gate, layout)


def test_tensor_parallel_ranks_keep_the_same_gate(pools):
    run = RUN | TP2 | EP2 | {"train_iters": 3}
    for gate in ("gshard", "soft"):
        result = pools.plugin.run(**run, **flags(gate)).ok()
        assert result.losses[-1] < result.losses[0]
        assert all(weights == result.inspected[0] for weights in result.inspected)


def test_a_gate_that_trains_is_saved_and_goes_on_with_replicas(pools, tmp_path):
    run = RUN | EP4 | flags("xmoe") | {"resilient_checkpoint_format": "experts"}
    whole = pools.plugin.run(**run, save=tmp_path, save_interval=3).ok()
    assert whole.losses[-1] < whole.losses[0] - 0.3
    plain = pools.plugin.run(**run, load=tmp_path, ckpt_step=3).ok()
    assert plain.numbers == whole.numbers[3:]
    assert plain.inspected == whole.inspected
    replicas = pools.plugin.run(**(run | REPLICAS), load=tmp_path, ckpt_step=3).ok()
    assert relative(replicas.losses, whole.losses[3:]) < 1e-5


@pytest.mark.parametrize("gate", LOOKAHEAD)
def test_a_world_that_does_not_fit_the_batch_trains_the_same(pools, tmp_path, gate):
    run = RUN | flags(gate) | {"train_iters": 2, "resilient_run_dir": str(tmp_path)}
    run["resilient_expert_load_interval"] = 2
    ours, theirs = (pools.plugin.run(world, **run).ok() for world in (3, 1))
    assert relative(ours.losses, theirs.losses) < 1e-5
    assert relative(ours.grad_norms, theirs.grad_norms) < 1e-5
    tokens = [sum(event["tokens"]) for event in events_of(tmp_path, "expert_load")]
    assert tokens[0] == pytest.approx(tokens[1], abs=4 if gate == "soft" else 0)


def test_hooks_and_wires(pools):
    differences, places, said = pools.plugin.call(f"{PROBE}:parts_and_wires")[0]
    for exact in ("parted", "part by part", "noting"):
        assert differences[exact] == [0.0, 0.0], exact
    for rounded, least, most in (("bf16", 1e-5, 2e-2), ("fp8", 1e-3, 0.2)):
        assert all(least < each < most for each in differences[rounded])
    # The same rounding, whichever replica computes.
    assert differences["fp8 replicas"] == pytest.approx(differences["fp8"], rel=1e-3)
    assert places == [
        *("start 1", "start 2", "dispatch 1", "dispatch 2", "arrived 2", "arrived 1"),
        *("combine 1", "combine 2", "back 2", "back 1", "end 2", "end 1"),
    ]
    assert "hook before_combine (<lambda>) returned NoneType" in said["no tensor"]
    assert "every row has a receiver" in said["rows"]


def test_registered_hooks_are_called_in_training(pools):
    run = RUN | EP4 | {"train_iters": 2}
    plain = pools.plugin.run(**run).ok()
    pools.plugin.call(f"{PROBE}:register")
    try:
        hooked = pools.plugin.run(**run).ok()
    finally:
        pools.plugin.call(f"{PROBE}:unregister")
    assert hooked.numbers == plain.numbers  # doubled and halved: the same bits
    narrow = pools.plugin.run(**run, resilient_wire_dtype="fp8").ok()
    assert 0 < relative(narrow.losses, plain.losses) < 1e-2
