"""Megatron's own flags of loading mean for per-expert checkpoints what they mean for Megatron's."""

import re

import pytest

from tests.gloo.test_expert_checkpoints import END, FORMAT, MODEL, SAVED
from tests.support.layouts import EP2, EP4

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

RUN = MODEL | EP4 | {"split": "90,10,0", "eval_iters": 1, "seed": 77}
STOCK = {name: value for name, value in RUN.items() if name not in FORMAT}
LONGER = {"train_iters": END + 2, "override_opt_param_scheduler": True}


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """One training run, saved in both formats: (ours, stock's)."""
    folder = tmp_path_factory.mktemp("saved")
    for format, name in (("experts", "ours"), ("torch_dist", "stock")):
        changes = {"resilient_checkpoint_format": format, "save": folder / name}
        pools.plugin.run(**(RUN | changes)).ok()
    return folder / "ours", folder / "stock"


FLAGS = {
    "finetune": {"finetune": True},
    "no-load": {"no_load_optim": True, "no_load_rng": True, "hidden_dropout": 0.1},
    "ckpt-step": {"ckpt_step": SAVED},
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_run_goes_on_as_from_stocks_format(pools, saved, name):
    ours, stock = (
        pools.plugin.run(**(RUN | LONGER | FLAGS[name] | {"load": folder})).ok() for folder in saved
    )
    assert len(ours.losses) == {"finetune": END + 2, "ckpt-step": END + 2 - SAVED}.get(name, 2)
    assert ours.numbers == stock.numbers


def test_evaluation_only(pools, saved):
    losses = []
    for folder in saved:
        changes = EP2 | {"bf16": True, "skip_train": True, "load": folder, "save": folder}
        output = pools.plugin.run(**(RUN | changes)).ok().outputs[-1]
        losses += re.findall(r"lm loss value: (\S+)", output)
    half = len(losses) // 2
    assert half
    assert losses[:half] == losses[half:]


def test_a_step_that_is_not_there_is_named(pools, saved):
    refused = pools.plugin.run(**RUN, load=saved[0], ckpt_step=SAVED + 1, as_script=True)
    assert set(refused.exits) == {1}
    assert f"no checkpoint of that step; there are: {END}, {SAVED}" in refused.outputs[0]


def test_the_newer_of_both_formats_is_loaded(pools, tmp_path):
    model = RUN | {"load": tmp_path, "save": tmp_path, "override_opt_param_scheduler": True}
    pools.plugin.run(**(model | {"train_iters": SAVED})).ok()
    stock = model | {"resilient_checkpoint_format": "torch_dist"}
    assert len(pools.plugin.run(**stock).ok().losses) == END - SAVED
    assert len(pools.plugin.run(**(model | LONGER)).ok().losses) == 2


def test_a_pretrained_checkpoint_is_finetuned(pools, saved, tmp_path):
    model = RUN | {"pretrained_checkpoint": saved[0], "train_iters": SAVED}
    new = pools.plugin.run(**model, load=tmp_path, save=tmp_path).ok()
    tuned = pools.plugin.run(**(RUN | {"train_iters": SAVED}), load=saved[0], finetune=True).ok()
    assert new.numbers == tuned.numbers
