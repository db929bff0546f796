"""Command lines: Megatron's flags and ours in one parser, and one line for what is wrong."""

import argparse
import os
from collections.abc import Callable
from typing import NoReturn

from megatron_resilient import plugin
from megatron_resilient.config import add_flags, config_from_args
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import (
    checkpoint_arguments,
    cpu,
    elastic_arguments,
    gate_arguments,
    given_flags,
    overlap_arguments,
    replica_arguments,
    uneven_arguments,
)
from megatron_resilient.mcore.one_line import one_line

# What Megatron raises for flags and for the tokenizer that they name.
_REFUSALS = (AssertionError, ValueError, RuntimeError, LookupError, ImportError, OSError)

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_and_validate(
    original: Callable[..., argparse.Namespace],
    extra_args_provider: Provider | None = None,
    **options,
) -> argparse.Namespace:
    """Runs Megatron's `parse_and_validate_args` with our flags added.

    Args:
        original: Megatron's function.
        extra_args_provider: the user's own, called after ours.
        **options: passed on.

    Raises:
        ConfigError: a flag, ours or Megatron's, or a combination that cannot work. One line.
    """
    parsers: list[_Parser] = []

    def provider(parser):
        add_flags(parser)
        if plugin.on_cpu():
            cpu.set_defaults(parser)
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        # Megatron makes the parser itself and parses right after this call; a subclass in place
        # is how our checks come before Megatron's without another patch.
        parser.__class__ = _Parser
        parsers.append(parser)
        return parser

    try:
        args = original(extra_args_provider=provider, **options)
        args.num_experts = parsers[0].logical_experts or args.num_experts
        args.eval_global_batch_size = parsers[0].evaluation_batch or args.eval_global_batch_size
        return args
    except ConfigError:
        raise
    except _REFUSALS as error:
        raise ConfigError(f"Megatron refuses these flags: {one_line(error)}") from error


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without a usage text of a thousand flags."""

    logical_experts: int | None = None
    evaluation_batch: int | None = None

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists all flags)")

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        if elastic_arguments.is_elastic():
            elastic_arguments.join_world(parsed)
        check(parsed)
        given_flags.note(parsed)
        if parsed.resilient_slots_per_rank and parsed.num_experts:
            # Slots need not divide the experts among ranks; Megatron's validation demands it.
            self.logical_experts = parsed.num_experts
            ranks = parsed.expert_model_parallel_size
            parsed.num_experts = -(-parsed.num_experts // ranks) * ranks
        self.evaluation_batch = uneven_arguments.pad_evaluation(parsed)
        return parsed, unknown


def check(args: argparse.Namespace) -> None:
    """Checks parsed flags against each other, and the files they name, before any work begins.

    Raises:
        ConfigError: names the flag and what to do.
    """
    elastic = elastic_arguments.is_elastic()
    if elastic:
        elastic_arguments.adapt(args)
    config = config_from_args(args)
    if plugin.on_cpu():
        cpu.adapt(args)
    _check_layout(args)
    uneven_arguments.check(args, elastic)
    replica_arguments.check(args, config.replicas)
    gate_arguments.check(args, config.gates)
    overlap_arguments.check(args, config.overlap, config.gates, elastic)
    checkpoint_arguments.check(args, elastic)
    _check_data_files(args)
    if args.eval_interval is None and not args.full_validation:
        raise ConfigError(
            "--eval-interval is missing: Megatron needs it to size its validation data "
            "(with --eval-iters 0 any number will do)"
        )
    if args.save is not None and args.save_interval is None:
        raise ConfigError(f"--save {args.save}: --save-interval is missing (steps between two)")


def _check_layout(args: argparse.Namespace) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dense = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if world % dense:
        raise ConfigError(
            f"{world} ranks cannot hold TP {args.tensor_model_parallel_size} x PP "
            f"{args.pipeline_model_parallel_size} x CP {args.context_parallel_size}: start a "
            f"multiple of {dense} ranks or make one of them smaller"
        )
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert = expert_tp * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if world % expert:
        raise ConfigError(
            f"{world} ranks cannot hold expert TP {expert_tp} x EP "
            f"{args.expert_model_parallel_size} x PP {args.pipeline_model_parallel_size}: start a "
            f"multiple of {expert} ranks or make one of them smaller"
        )
    tensor_parallel = args.tensor_model_parallel_size
    untrainable = tensor_parallel > 1 and not args.sequence_parallel and not args.skip_train
    if args.num_experts and untrainable:
        raise ConfigError(
            f"--sequence-parallel is missing: experts with --tensor-model-parallel-size "
            f"{tensor_parallel} are trained only with it"
        )


def _check_data_files(args: argparse.Namespace) -> None:
    flags = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    for flag in flags:
        for prefix in getattr(args, flag, None) or ():
            if _is_weight(prefix) or "://" in prefix:
                continue
            for suffix in (".bin", ".idx"):
                if not os.path.exists(prefix + suffix):
                    raise ConfigError(
                        f"--{flag.replace('_', '-')} {prefix}: there is no {prefix}{suffix}; "
                        "`megatron-resilient prepare-data` makes both files from text"
                    )
    model = getattr(args, "tokenizer_model", None)
    # A relative path may be a model's name on the Hub.
    on_hub = args.tokenizer_type == "HuggingFaceTokenizer" and not (model or "").startswith(
        (os.sep, os.curdir)
    )
    is_path = model and os.sep in model and "://" not in model and not on_hub
    if is_path and not os.path.exists(model):
        raise ConfigError(f"--tokenizer-model {model}: no such file")


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
