"""The parameters of an experts module, slot by slot, whatever class holds them."""

import re

from torch import nn

# TEGroupedMLP names a slot's tensors linear_fc1.weight0, linear_fc1.weight1, ...
_GROUPED_NAME = re.compile(r"(?P<kind>.*(?:weight|bias))(?P<slot>\d+)")
_SEQUENTIAL_NAME = re.compile(r"local_experts\.(?P<slot>\d+)\.(?P<kind>.*)")


def slot_parameters(experts: nn.Module, slots: int) -> dict[str, list[nn.Parameter]]:
    """Returns {kind: [parameter of slot 0, of slot 1, ...]}, kinds in one order on all ranks.

    A kind is a name such as `linear_fc1.weight`; all slots have the same kinds.

    Args:
        experts: Megatron's SequentialMLP or TEGroupedMLP.
        slots: local slots.

    Raises:
        TypeError: the module keeps its parameters in another way.
    """
    found: dict[str, list[nn.Parameter | None]] = {}
    for name, parameter in experts.named_parameters():
        match = _SEQUENTIAL_NAME.fullmatch(name) or _GROUPED_NAME.fullmatch(name)
        if match is None or int(match["slot"]) >= slots:
            raise TypeError(
                f"{type(experts).__name__}.{name} belongs to no slot: replicas need "
                "SequentialMLP, or TEGroupedMLP with one parameter per expert"
            )
        found.setdefault(match["kind"], [None] * slots)[int(match["slot"])] = parameter
    for kind, parameters in found.items():
        if any(parameter is None for parameter in parameters):
            raise TypeError(f"{type(experts).__name__}: not every slot has a {kind}")
    return {kind: found[kind] for kind in sorted(found)}  # type: ignore[misc]


def slot_of_key(key: str) -> int | None:
    """Returns the slot that a state-dict key of an experts module belongs to, None for none.

    Keys of TEGroupedMLP may end in `_w` or `_v`, the halves of a gated weight.
    """
    sequential = re.search(r"local_experts\.(\d+)\.", key)
    if sequential:
        return int(sequential[1])
    grouped = re.search(r"(?:weight|bias)(\d+)(?:_[wv])?$", key)
    return int(grouped[1]) if grouped else None
