"""RNG streams of experts in checkpoints: one per expert-parallel rank, in stock's own format.

Megatron saves one state per (pipeline, tensor) rank, that of data-parallel rank 0. We add to it the
expert streams of all expert-parallel ranks under names of their own, so that stock Megatron still
reads our checkpoints and we read stock's. A rank without a saved stream (another expert-parallel
size, or a stock checkpoint) keeps the stream that its seed gives.
"""

from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name

from megatron_resilient.comm.gather_json import gather_json


def name_of(expert_tp_rank: int, ep_rank: int) -> str:
    """Names the stream of an expert tensor- and expert-parallel rank in a checkpoint."""
    return f"{get_expert_parallel_rng_tracker_name()}/etp{expert_tp_rank}.ep{ep_rank}"


def _own_name() -> str:
    return name_of(mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_model_parallel_rank())


def with_all_expert_states(rng_state: Any) -> Any:
    """Adds the expert streams of the whole expert-parallel group to what `get_rng_state` returned.

    Collective over the expert tensor- and model-parallel group.

    Args:
        rng_state: a ShardedObject around a list of states, or that list.
    """
    group = mpu.get_expert_tensor_and_model_parallel_group(check_initialized=False)
    own = own_stream()
    states = getattr(rng_state, "data", rng_state)
    if own is None or not isinstance(states, list):
        return rng_state
    everyone = {_own_name(): own}
    if group is not None and group.size() > 1:
        told = gather_json([_own_name(), own.cpu().tolist()], group)
        everyone = {name: torch.tensor(numbers, dtype=own.dtype) for name, numbers in told}
    for state in states:
        state["rng_tracker_states"] = {**state["rng_tracker_states"], **everyone}
    return rng_state


def own_stream() -> Any:
    """Returns this rank's expert stream, None if the tracker has none."""
    return get_cuda_rng_tracker().get_states().get(get_expert_parallel_rng_tracker_name())


def set_own_stream(stream: torch.Tensor) -> None:
    """Gives this rank's experts a stream.

    Args:
        stream: a state of the tracker, as bytes.
    """
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    name = get_expert_parallel_rng_tracker_name()
    states[name] = stream.cpu().view(states[name].dtype)
    tracker.set_states(states)


def take_own(seeded: Any) -> None:
    """After a load: keeps this rank's expert stream and drops those of the others. Local.

    Args:
        seeded: `own_stream()` from before the load, for a checkpoint without one for this rank.
    """
    tracker = get_cuda_rng_tracker()
    shared = get_expert_parallel_rng_tracker_name()
    states = tracker.get_states()
    if seeded is None or shared not in states:
        return
    saved = {name: state for name, state in states.items() if name.startswith(f"{shared}/")}
    kept = {name: state for name, state in states.items() if name not in saved}
    if _own_name() in saved:
        kept[shared] = saved[_own_name()]
    elif _own_name() != name_of(0, 0):
        kept[shared] = seeded
    tracker.set_states(kept)
