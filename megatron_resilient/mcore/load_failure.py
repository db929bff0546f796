"""Why a checkpoint could not be loaded: the flags of its model against ours, or the first error."""

import os
from types import SimpleNamespace
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_resilient.mcore import tracker_file
from megatron_resilient.mcore.one_line import one_line

# What changes the shapes, names or number of the tensors of a model or of its optimizer, and from
# what it follows where the command line does not say it.
_MODEL_FLAGS: dict[str, tuple[str, ...]] = {
    "num_layers": (),
    "hidden_size": (),
    "num_attention_heads": (),
    "swiglu": (),
    "normalization": (),
    "position_embedding_type": (),
    "multi_latent_attention": (),
    "group_query_attention": (),
    "qk_layernorm": (),
    "untie_embeddings_and_output_weights": (),
    "num_experts": (),
    "moe_layer_freq": (),
    "moe_shared_expert_intermediate_size": (),
    "moe_router_enable_expert_bias": (),
    "bf16": (),
    "fp16": (),
    "num_query_groups": ("group_query_attention", "num_attention_heads"),
    "kv_channels": ("hidden_size", "num_attention_heads"),
    "ffn_hidden_size": ("hidden_size", "swiglu"),
    "moe_ffn_hidden_size": ("ffn_hidden_size", "hidden_size", "swiglu"),
}


def reason(error: BaseException, args: Any, folder: str) -> str:
    """Returns one line that says why loading from `folder` failed.

    Local: reads the small common part of a torch_dist checkpoint.

    Args:
        error: what was raised.
        args: Megatron's arguments of this run.
        folder: of `--load`.
    """
    saved = _saved_arguments(folder, args.ckpt_step)
    differ = [
        name
        for name in _MODEL_FLAGS
        if hasattr(saved, name) and hasattr(args, name)
        if getattr(saved, name) != getattr(args, name)
    ]
    if not args.group_query_attention and "num_query_groups" in differ:
        differ.remove("num_query_groups")  # means nothing, and Megatron changes it on the way
    different = [
        f"--{name.replace('_', '-')} is {getattr(saved, name)} there, {getattr(args, name)} here"
        for name in differ
        if not set(_MODEL_FLAGS[name]) & set(differ)
    ]
    if different:
        return "; ".join(different)
    line = one_line(error)
    if line.startswith("OptimizerParamScheduler"):
        line += "; --override-opt-param-scheduler takes what the command line says"
    return line


def _saved_arguments(folder: str, step: int | None) -> Any:
    path = tracker_file.newest_checkpoint(folder, step)
    if path is None or not os.path.isdir(path):
        return SimpleNamespace()
    try:
        common = dist_checkpointing.load_common_state_dict(path)
    except (CheckpointingException, OSError, RuntimeError):
        return SimpleNamespace()  # damaged, or of another format: the first error says so
    return common.get("args") or SimpleNamespace()
