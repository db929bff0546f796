"""Optimizer states between worlds with and without expert parallelism.

With EP > 1 Megatron chains two optimizers, dense and expert; with EP = 1 there is one. Tensors are
saved by parameter name and fit both. What does not fit is the small common part: it is a list with
one entry per chained optimizer, or no list, and expert parameter groups exist only in the first.
"""

from collections.abc import Callable
from typing import Any

StateDict = dict[Any, Any]


def adapt(state_dict: Any, current: list[list[StateDict]]) -> Any:
    """Rearranges a loaded optimizer state for the optimizers that are here.

    Args:
        state_dict: what dist_checkpointing loaded: the sharded part in the layout of this world,
            the common part in that of the checkpoint, merged key by key.
        current: parameter groups of each chained optimizer of this world.

    Returns:
        The state in this world's layout; `state_dict` itself if it has it already.

    Raises:
        ValueError: a group of this world has no counterpart in the checkpoint.
    """
    if not isinstance(state_dict, dict):
        return state_dict
    entries = {key: value for key, value in state_dict.items() if isinstance(key, int)}
    single = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    if len(current) == 1 and entries:
        saved = [entries[key] for key in sorted(entries)]
        return _fill(single, saved, current[0])
    if len(current) > 1 and single:
        return [_fill(entries[i], [single], groups) for i, groups in enumerate(current)]
    return state_dict


def _fill(sharded: StateDict, saved: list[StateDict], groups: list[StateDict]) -> StateDict:
    """Returns one optimizer's state: its sharded part with the common part of `saved`."""
    # The distributed optimizer keeps the common part one level deeper.
    deeper = any("optimizer" in entry for entry in saved)
    commons = [entry["optimizer"] if deeper else entry for entry in saved if entry]
    saved_groups = [group for common in commons for group in common.get("param_groups", ())]
    mine = dict(sharded)
    holder = dict(mine.get("optimizer", {})) if deeper else mine
    requested = holder.get("param_groups") or [{} for _ in groups]
    holder["param_groups"] = [
        _group_for(group, saved_groups) | _params_of(request)
        for group, request in zip(groups, requested, strict=True)
    ]
    state = {}
    for common in commons:
        # Keys of tensors are numbers of parameters and come from the sharded part.
        state.update({k: v for k, v in common.get("state", {}).items() if not isinstance(k, int)})
    if not deeper:
        holder["state"] = {**holder.get("state", {}), **state}
    if deeper:
        mine["optimizer"] = holder
        for entry in saved:
            for key, value in entry.items():
                mine.setdefault(key, value)
    return mine


def _group_for(group: StateDict, saved: list[StateDict]) -> StateDict:
    wanted = _identity(group)
    for candidate in saved:
        if _identity(candidate) == wanted:
            return {**candidate, "is_expert_parallel": group.get("is_expert_parallel", False)}
    raise ValueError(
        f"the checkpoint has no parameter group with {dict(zip(_keys(), wanted, strict=True))}"
    )


def _identity(group: StateDict) -> tuple[Any, ...]:
    """What tells groups apart, apart from who holds them. NeMo calls some keys `pre_<key>`."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _keys())


def _keys() -> list[str]:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return [key for key in param_group_identifier_keys if key != "is_expert_parallel"]


def _params_of(request: StateDict) -> StateDict:
    return {"params": request["params"]} if "params" in request else {}


def load(original: Callable[..., None], chained: Any, state_dict: Any) -> None:
    """Runs `ChainedOptimizer.load_state_dict` on a state in this world's layout."""
    current = [optimizer.param_groups for optimizer in chained.chained_optimizers]
    original(chained, adapt(state_dict, current))
