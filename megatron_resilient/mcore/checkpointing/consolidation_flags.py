"""Flags with which Megatron builds the model of a checkpoint here: on a CPU, without its data."""

import argparse
import sys
from typing import Any

from megatron.training.arguments import parse_args, validate_args

from megatron_resilient.checkpoint.manifest import Manifest
from megatron_resilient.config import PREFIX, add_flags
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import cpu
from megatron_resilient.mcore.checkpointing.consolidation_ranks import INSTEAD, flags_of
from megatron_resilient.mcore.one_line import one_line

# What the model, its optimizer and the scheduler do not depend on, as the process here needs it.
_HERE: dict[str, Any] = {
    **{name: value for name, value in cpu.DEFAULTS.items() if name != "transformer_impl"},
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "micro_batch_size": 1,
    "rampup_batch_size": None,
    "decrease_batch_size_if_needed": False,
    "load": None,
    "save": None,
    "save_interval": None,
    "pretrained_checkpoint": None,
    "finetune": False,
    "no_load_optim": None,
    "no_load_rng": True,  # it is put into the new checkpoint without going through this process
    "no_save_optim": None,
    "no_save_rng": None,
    "ckpt_step": None,
    "ckpt_format": "torch_dist",
    "ckpt_convert_format": None,
    "async_save": False,
    "non_persistent_save_interval": None,
    "non_persistent_ckpt_type": None,
    "dist_ckpt_optim_fully_reshardable": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "use_checkpoint_opt_param_scheduler": True,
    "override_opt_param_scheduler": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "skip_train": False,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "tokenizer_model": None,
    "vocab_file": None,
    "merge_file": None,
    "tensorboard_dir": None,
    "wandb_project": None,
    "enable_one_logger": False,
    "log_progress": False,
    "profile": False,
    "exit_signal_handler": False,
    "exit_signal_handler_for_training": False,
    "logits_save_dir": None,
    "logits_load_dir": None,
    "data_parallel_random_init": False,
    "rank": None,
    "world_size": None,
}
# (flag, is it in the way?, why)
_REFUSED = (
    ("yaml_cfg", bool, "its flags are in another file"),
    ("hybrid_layer_pattern", bool, "only models from Megatron's GPT flags are built here"),
    ("heterogeneous_layers_config_path", bool, "its layers are described in another file"),
)


def build(manifest: Manifest) -> argparse.Namespace:
    """Returns validated flags for the model of a checkpoint in the processes here.

    Raises:
        ConfigError: the model cannot be built here; names the flag.
    """
    flags = flags_of(manifest)
    for name, in_the_way, why in _REFUSED:
        if in_the_way(flags.get(name)):
            raise ConfigError(f"--{name.replace('_', '-')} {flags[name]}: {why}; {INSTEAD}")
    args = _parsed()
    enums = {name for name, value in vars(args).items() if hasattr(value, "name")}
    for name, value in (flags | _HERE).items():
        if name.startswith(PREFIX) or name in enums or name in ("rank", "world_size"):
            continue
        setattr(args, name, value)
    # Its fully reshardable state has the other kind's, too.
    args.use_distributed_optimizer = flags.get("optimizer", "adam") == "adam"
    args.eval_interval = args.eval_interval or 1
    try:
        cpu.adapt(args)
        validate_args(args, {})
    except ConfigError as error:
        raise ConfigError(f"the model of this checkpoint: {error}; or {INSTEAD}") from error
    except (AssertionError, ValueError, RuntimeError, LookupError, OSError) as error:
        raise ConfigError(
            f"Megatron cannot build this model here: {one_line(error)}; {INSTEAD}"
        ) from error
    args.padded_vocab_size = manifest.model["padded_vocab_size"]
    return args


def as_of_the_run(args: argparse.Namespace, manifest: Manifest) -> argparse.Namespace:
    """Returns the flags that stock Megatron is to find in the checkpoint: those of the run.

    Args:
        args: those of the processes here, with the progress that was loaded.
        manifest: of the checkpoint.
    """
    flags, defaults = flags_of(manifest), vars(_parsed())
    kept = {name: value for name, value in vars(args).items() if not name.startswith(PREFIX)}
    for name in (*_HERE, "use_distributed_optimizer"):
        kept[name] = flags.get(name, defaults.get(name))
    kept["ckpt_format"] = "torch_dist"
    kept["rank"], kept["world_size"] = 0, flags["world_size"]
    share = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * kept["context_parallel_size"]
    )
    kept["data_parallel_size"] = max(1, flags["world_size"] // share)
    return argparse.Namespace(**kept)


def _parsed() -> argparse.Namespace:
    """Returns Megatron's and our flags as they are when none is given."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        return parse_args(_provider)
    finally:
        sys.argv = arguments


def _provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_flags(parser)
    cpu.set_defaults(parser)
    return parser
