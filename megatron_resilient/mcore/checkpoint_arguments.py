"""Flags of per-expert checkpoints against Megatron's: what cannot be combined is refused."""

import argparse

from megatron_resilient.errors import ConfigError

# (attribute, is it in the way?, why)
_REFUSED = (
    ("use_precision_aware_optimizer", bool, "its fp32 copies are out of reach"),
    ("optimizer_cpu_offload", bool, "its copies are out of reach"),
    ("use_megatron_fsdp", bool, "its shards have no names of ours"),
    ("use_torch_fsdp2", bool, "its shards have no names of ours"),
    ("num_distributed_optimizer_instances", lambda v: (v or 1) > 1, "shards are kept in one place"),
    ("optimizer", lambda v: v not in ("adam", "sgd"), "only Adam's and SGD's state has names"),
    ("no_save_optim", bool, "moments are part of every save"),
    ("no_save_rng", bool, "random streams are part of every save"),
    ("use_checkpoint_args", bool, "the flags of a run are not taken from its checkpoint"),
    ("non_persistent_save_interval", bool, "the newest save stays in memory anyway"),
)


def check(args: argparse.Namespace, elastic: bool) -> None:
    """Checks what a run with per-expert checkpoints cannot have, and has signals end it with one.

    Args:
        args: parsed flags.
        elastic: an agent takes the signals.

    Raises:
        ConfigError: a flag that cannot be combined with this format.
    """
    partial = args.resilient_checkpoint_experts
    if partial and args.resilient_checkpoint_exact:
        raise ConfigError(
            f"--resilient-checkpoint-exact excludes --resilient-checkpoint-experts {partial}: "
            "drop one of them"
        )
    if args.resilient_checkpoint_format != "experts":
        if partial or args.resilient_checkpoint_exact:
            flag = f"experts {partial}" if partial else "exact"
            raise ConfigError(
                f"--resilient-checkpoint-{flag} needs --resilient-checkpoint-format experts"
            )
        return
    for name, in_the_way, why in _REFUSED:
        value = getattr(args, name, None)
        if in_the_way(value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} with --resilient-checkpoint-format experts: "
                f"{why}"
            )
    args.exit_signal_handler = args.exit_signal_handler or bool(args.save and not elastic)
    if not args.num_experts:
        if partial:
            raise ConfigError(
                f"--resilient-checkpoint-experts {partial}: the model has no experts; pass "
                "--num-experts"
            )
        return
    if partial and args.resilient_require_exact:
        raise ConfigError(
            f"--resilient-require-exact excludes --resilient-checkpoint-experts {partial}: a "
            "partial checkpoint is none that all could go back to"
        )
    if partial > args.num_experts:
        raise ConfigError(
            f"--resilient-checkpoint-experts {partial}: a layer has {args.num_experts}; 0 saves all"
        )
