"""State dicts of stock Megatron's torch_dist checkpoints: what the consolidated one adds to them.

The fully reshardable state of the distributed optimizer has each parameter's values under the name
of the parameter, as the state of the other optimizers has. What differs is small and stands beside:
both kinds of optimizer then find theirs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name

from megatron_resilient.mcore.expert_rng import name_of

# How the two kinds of optimizers call the fp32 copy of a parameter.
_DISTRIBUTED, _OTHER = "optimizer.state.param.", "optimizer.state.fp32_param."

Streams = Mapping[str, torch.Tensor]  # {key of the manifest: bytes}


def for_both_optimizers(state: dict[Any, Any], mixed_precision: bool, step: Any) -> None:
    """Adds what optimizers that are not distributed look for.

    Args:
        state: what `sharded_state_dict` of a chained optimizer returned, changed in place.
        mixed_precision: weights are bf16 or fp16: they look for fp32 copies under another name.
        step: steps of the optimizer, as a number or a tensor; None: it does not count them so.
    """
    singles = [each for number, each in state.items() if isinstance(number, int)] or [state]
    common = {} if step is None else {"common_step": torch.tensor(float(step))}
    for single in singles:
        if "param_state" not in single:
            continue
        groups = single["optimizer"]["param_groups"]
        if not mixed_precision:
            single["state"], single["param_groups"] = common, [dict(group) for group in groups]
            continue
        single["optimizer"]["state"] = common
        # Loading finds tensors by their keys, not by the place that they have here.
        single["fp32_copies"] = {
            number: dataclasses.replace(
                entry["param"], key=entry["param"].key.replace(_DISTRIBUTED, _OTHER, 1)
            )
            for number, entry in single["param_state"].items()
        }


def random_states(streams: Streams, expert_parallel_size: int) -> ShardedObject:
    """Returns this rank's random streams as `get_rng_state` does, those of all experts included.

    Args:
        streams: of the checkpoint.
        expert_parallel_size: of the run; stock keeps the experts' stream of a coordinate's first
            data-parallel rank.
    """
    stage, tensor = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    own = {
        key.split("/", 2)[2]: data
        for key, data in streams.items()
        if key.startswith(f"random/{stage}.{tensor}/")
    }
    trackers = {
        name.removeprefix("tracker."): data
        for name, data in own.items()
        if name.startswith("tracker.")
    }
    trackers |= _of_experts(streams, stage, tensor, expert_parallel_size)
    words = own["numpy"].numpy().view(np.uint32)
    state = {
        "random_rng_state": (3, tuple(own["python"].view(torch.int64).tolist()), None),
        "np_rng_state": ("MT19937", words[:624].copy(), int(words[624]), 0, 0.0),
        "torch_rng_state": own["torch"],
        # Without a GPU Megatron on the CPU backend has one generator for both.
        "cuda_rng_state": own.get("cuda", own["torch"]),
        "rng_tracker_states": trackers,
    }
    size = (
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_world_size(),
    )
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], size, (stage, tensor), replica_id=replica)


def _of_experts(streams: Streams, stage: int, tensor: int, size: int) -> dict[str, torch.Tensor]:
    shared = get_expert_parallel_rng_tracker_name()
    expert_tensor = mpu.get_expert_tensor_parallel_world_size()
    first = (tensor % expert_tensor, tensor // expert_tensor % size)
    found = {}
    for key, data in streams.items():
        parts = key.split("/")
        if parts[0] != "random_experts" or parts[1] != str(size):
            continue
        pipeline, part, rank = map(int, parts[2].split("."))
        if pipeline == stage:
            found[name_of(part, rank)] = data
            if (part, rank) == first:
                found[shared] = data
    return found
