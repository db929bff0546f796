"""Flags of per-expert checkpoints: what is refused, and in which words."""

from argparse import Namespace

import pytest

from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import checkpoint_arguments

ARGS = {
    "resilient_checkpoint_format": "experts",
    "resilient_checkpoint_experts": 0,
    "resilient_checkpoint_exact": False,
    "resilient_require_exact": False,
    "num_experts": 8,
    "optimizer": "adam",
    "save": None,
    "exit_signal_handler": False,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resilient_checkpoint_exact": True},
        {"resilient_checkpoint_experts": 8},
        {"num_experts": None},
        {"optimizer": "sgd"},
        {"resilient_checkpoint_format": "torch_dist", "no_save_optim": True},
    ],
)
def test_what_can_be_combined(changes):
    checkpoint_arguments.check(Namespace(**(ARGS | changes)), elastic=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"resilient_checkpoint_exact": True, "resilient_checkpoint_experts": 2},
            "--resilient-checkpoint-exact excludes --resilient-checkpoint-experts 2",
        ),
        (
            {"resilient_checkpoint_format": "torch_dist", "resilient_checkpoint_experts": 2},
            "--resilient-checkpoint-experts 2 needs --resilient-checkpoint-format experts",
        ),
        (
            {"resilient_checkpoint_format": "torch_dist", "resilient_checkpoint_exact": True},
            "--resilient-checkpoint-exact needs --resilient-checkpoint-format experts",
        ),
        (
            {"resilient_require_exact": True, "resilient_checkpoint_experts": 1},
            "--resilient-require-exact excludes --resilient-checkpoint-experts 1",
        ),
        ({"num_experts": None, "resilient_checkpoint_experts": 1}, "the model has no experts"),
        ({"resilient_checkpoint_experts": 9}, "--resilient-checkpoint-experts 9: a layer has 8"),
        (
            {"use_megatron_fsdp": True},
            "--use-megatron-fsdp True with --resilient-checkpoint-format",
        ),
        ({"optimizer": "muon"}, "--optimizer muon with --resilient-checkpoint-format experts"),
        ({"no_save_rng": True}, "random streams are part of every save"),
        ({"num_distributed_optimizer_instances": 2}, "shards are kept in one place"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_arguments.check(Namespace(**(ARGS | changes)), elastic=False)


@pytest.mark.parametrize(("save", "elastic"), [("a", False), ("a", True), (None, False)])
def test_signals_end_a_run_that_saves_unless_an_agent_takes_them(save, elastic):
    args = Namespace(**(ARGS | {"save": save}))
    checkpoint_arguments.check(args, elastic)
    assert args.exit_signal_handler == (save is not None and not elastic)
