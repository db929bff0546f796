"""The common part of an optimizer state between worlds with and without expert parallelism.

Here with made-up states; tests/patches saves and loads real ones.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.mcore import optimizer_layout
from megatron_resilient.patching.source import SourceTree
from megatron_resilient.patching.target import Target

KEYS = ["wd_mult", "lr_mult", "is_decoupled_lr"]


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setattr(optimizer_layout, "_keys", lambda: KEYS)


def group(wd_mult=1.0, expert=False, **more):
    return {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": expert,
        **more,
    }


DENSE, DENSE_BIAS, EXPERT = group(), group(wd_mult=0.0), group(expert=True)


def common(*groups, step=5, **state):
    """What a checkpoint holds of one optimizer besides tensors."""
    return {
        "state": {0: "a tensor of the saved world", "common_step": step, **state},
        "param_groups": [{**each, "step": step, "params": [100]} for each in groups],
    }


def sharded(*groups):
    """What the loading world asked for, with its tensors."""
    return {
        "state": {0: "w", 1: "x"},
        "param_groups": [{"params": [n]} for n, _ in enumerate(groups)],
    }


def test_the_keys_are_megatrons():
    source = SourceTree().definition(
        Target.parse("megatron.core.optimizer.optimizer:param_group_identifier_keys")
    )
    text = "\n".join(source.module.lines)
    assert "'is_expert_parallel'," in text
    assert "'lr_mult'," in text


def test_two_optimizers_become_one():
    saved = {0: common(DENSE, DENSE_BIAS), 1: common(EXPERT, expert_only="kept")}
    result = optimizer_layout.adapt({**saved, **sharded(DENSE, DENSE_BIAS)}, [[DENSE, DENSE_BIAS]])
    assert result.keys() == {"state", "param_groups"}
    assert result["state"] == {0: "w", 1: "x", "common_step": 5, "expert_only": "kept"}
    assert result["param_groups"] == [
        {**DENSE, "step": 5, "params": [0]},
        {**DENSE_BIAS, "step": 5, "params": [1]},
    ]


def test_one_optimizer_becomes_two():
    saved = common(DENSE, DENSE_BIAS)
    entries = {0: sharded(DENSE, DENSE_BIAS), 1: sharded(EXPERT)}
    dense, expert = optimizer_layout.adapt({**saved, **entries}, [[DENSE, DENSE_BIAS], [EXPERT]])
    assert [each["wd_mult"] for each in dense["param_groups"]] == [1.0, 0.0]
    assert [each["step"] for each in dense["param_groups"]] == [5, 5]
    # The expert group is the dense one of the same settings, told to be an expert's.
    assert expert["param_groups"] == [{**EXPERT, "step": 5, "params": [0]}]
    for each in (dense, expert):
        assert each["state"] == {0: "w", 1: "x", "common_step": 5}


def test_the_distributed_optimizer_keeps_the_common_part_one_level_deeper():
    saved = {
        0: {
            "optimizer": {"param_groups": [{**DENSE, "step": 7}]},
            "param_state_sharding_type": "f",
        },
        1: {"optimizer": {"param_groups": [{**EXPERT, "step": 7}]}},
    }
    result = optimizer_layout.adapt({**saved, "param_state": "tensors"}, [[DENSE]])
    assert result == {
        "param_state": "tensors",
        "param_state_sharding_type": "f",
        "optimizer": {"param_groups": [{**DENSE, "step": 7}]},
    }
    single = {"optimizer": {"param_groups": [{**DENSE, "step": 7}]}, "grad_scaler": "g"}
    entries = {0: {"param_state": "d"}, 1: {"param_state": "e"}}
    dense, expert = optimizer_layout.adapt({**single, **entries}, [[DENSE], [EXPERT]])
    assert dense["param_state"] == "d"
    assert expert["param_state"] == "e"
    assert expert["grad_scaler"] == "g"
    assert expert["optimizer"]["param_groups"] == [{**EXPERT, "step": 7}]


def test_states_that_fit_are_left_alone():
    two = {0: common(DENSE), 1: common(EXPERT)}
    assert optimizer_layout.adapt(two, [[DENSE], [EXPERT]]) is two
    one = common(DENSE)
    assert optimizer_layout.adapt(one, [[DENSE]]) is one
    assert optimizer_layout.adapt([one], [[DENSE]]) == [one]


def test_inputs_stay_as_they_are():
    saved = {0: common(DENSE), 1: common(EXPERT), **sharded(DENSE)}
    before = repr(saved)
    optimizer_layout.adapt(saved, [[DENSE]])
    assert repr(saved) == before


def test_a_group_without_a_counterpart_is_named():
    saved = {0: common(DENSE), 1: common(EXPERT), **sharded(DENSE)}
    with pytest.raises(ValueError, match=r"no parameter group with \{'wd_mult': 0\.5, 'lr_mult'"):
        optimizer_layout.adapt(saved, [[group(wd_mult=0.5)]])


def test_nemos_names_of_the_same_keys():
    renamed = {("pre_" + k if k in ("wd_mult", "lr_mult") else k): v for k, v in DENSE.items()}
    saved = {0: common(renamed), 1: common(EXPERT), **sharded(DENSE)}
    (result,) = optimizer_layout.adapt(saved, [[DENSE]])["param_groups"]
    assert result["step"] == 5
    assert result["pre_wd_mult"] == 1.0


@given(wd_mults=st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True), data=st.data())
def test_there_and_back_nothing_is_lost(wd_mults, data):
    """EP > 1 -> EP = 1 -> EP > 1: each group has its step again, in the order of this world."""
    dense = [group(wd) for wd in wd_mults]
    expert = [group(wd, expert=True) for wd in data.draw(st.permutations(wd_mults))]
    steps = {wd: number for number, wd in enumerate(wd_mults)}

    def saved(groups):
        return {"state": {}, "param_groups": [{**g, "step": steps[g["wd_mult"]]} for g in groups]}

    one = optimizer_layout.adapt({0: saved(dense), 1: saved(expert), "state": {}}, [dense])
    assert one["param_groups"] == saved(dense)["param_groups"]
    two = optimizer_layout.adapt({**one, 0: {}, 1: {}}, [dense, expert])
    assert [each["param_groups"] for each in two] == [
        saved(dense)["param_groups"],
        saved(expert)["param_groups"],
    ]
