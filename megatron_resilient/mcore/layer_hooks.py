"""Hooks into an MoE layer, at six places between its parts (FSMoE, arXiv 2501.10714, section 3).

A pretrain script registers functions before the model is built::

    import megatron_resilient

    def halve(tokens, layer):
        return tokens.bfloat16()

    def restore(tokens, layer):
        return tokens.float()

    megatron_resilient.register_moe_hooks(before_dispatch=halve, after_dispatch=restore)

Every MoE layer that is built afterwards calls them, with replicas or without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_resilient.errors import ConfigError, HookError

Hook = Callable[[torch.Tensor, Any], torch.Tensor]

PLACES = (
    "before_moe_start",
    "before_dispatch",
    "after_dispatch",
    "before_combine",
    "after_combine",
    "before_moe_end",
)
# What undoes something is called in the opposite order: pairs of functions nest.
_UNDOING = ("after_dispatch", "after_combine", "before_moe_end")
# Dispatch and combine send counted rows.
_KEEPS_ROWS = ("before_dispatch", "before_combine")


@dataclass(frozen=True, eq=False)
class LayerHooks:
    """Functions at the six places, all of one registration or None where it has none.

    A function gets the tensor that passes there and the layer, and returns the tensor that takes
    its place. Gradients flow through it, so it consists of what autograd knows. It runs on every
    rank, in every microbatch, and once more where activations are recomputed: it must do the same
    again, and random numbers come from Megatron's streams.

    Attributes:
        before_moe_start: the layer's input, [sequence, batch, hidden]; shared experts see it too.
        before_dispatch: tokens sorted by expert, [rows, hidden], before they are sent (with the
            allgather dispatcher: this rank's tokens as they are). Rows stay, in number and order;
            columns and type may change if `after_dispatch` undoes it.
        after_dispatch: what arrived, [rows, columns].
        before_combine: outputs of experts, [rows, hidden], before they are sent back.
        after_combine: what came back, [rows, columns], one row for each row dispatched.
        before_moe_end: the layer's output, [sequence, batch, hidden], with that of shared experts.
    """

    before_moe_start: Hook | None = None
    before_dispatch: Hook | None = None
    after_dispatch: Hook | None = None
    before_combine: Hook | None = None
    after_combine: Hook | None = None
    before_moe_end: Hook | None = None

    @property
    def any(self) -> bool:
        """Tells whether there is a function at all."""
        return any(getattr(self, place) is not None for place in PLACES)


class Registration:
    """What `register_moe_hooks` returns."""

    def __init__(self, hooks: LayerHooks):
        self._hooks = hooks

    def remove(self) -> None:
        """Takes the functions back; models that are built keep them. Twice is as good as once."""
        if self._hooks in _registered:
            _registered.remove(self._hooks)


_registered: list[LayerHooks] = []
_is_built = False


def register_moe_hooks(
    *,
    before_moe_start: Hook | None = None,
    before_dispatch: Hook | None = None,
    after_dispatch: Hook | None = None,
    before_combine: Hook | None = None,
    after_combine: Hook | None = None,
    before_moe_end: Hook | None = None,
) -> Registration:
    """Has every MoE layer of the models built from now on call functions between its parts.

    Several registrations nest: what was registered last is nearest to the experts' communication.
    `LayerHooks` says what each function gets and must keep.

    Returns:
        A handle with `remove()`.

    Raises:
        ConfigError: no function was given, or a model that would not call them is trained already.
    """
    hooks = LayerHooks(
        before_moe_start,
        before_dispatch,
        after_dispatch,
        before_combine,
        after_combine,
        before_moe_end,
    )
    if not hooks.any:
        raise ConfigError(f"register_moe_hooks: no function given; there are {', '.join(PLACES)}")
    if _is_built:
        raise ConfigError(
            "register_moe_hooks: the model is built already and would not call them; register "
            "before pretrain()"
        )
    _registered.append(hooks)
    return Registration(hooks)


def set_built(is_built: bool) -> None:
    """Says whether a model is there, so that what is registered now would come too late."""
    global _is_built
    _is_built = is_built


def registered() -> tuple[LayerHooks, ...]:
    """Returns the registrations in force, oldest first."""
    return tuple(_registered)


def call(hooks: tuple[LayerHooks, ...], place: str, tensor: torch.Tensor, layer: Any):
    """Calls the functions of a place one after the other.

    Args:
        hooks: registrations, outermost first.
        place: one of PLACES.
        tensor: what passes there.
        layer: the MoE layer.

    Returns:
        What the last of them returned; without any, the tensor itself.

    Raises:
        HookError: a function returned something else than a tensor, or other rows.
    """
    for each in reversed(hooks) if place in _UNDOING else hooks:
        function = getattr(each, place)
        if function is None:
            continue
        result = function(tensor, layer)
        name = getattr(function, "__name__", type(function).__name__)
        where = f"layer {layer.layer_number}: hook {place} ({name})"
        if not isinstance(result, torch.Tensor):
            raise HookError(f"{where} returned {type(result).__name__}; it must return a tensor")
        if place in _KEEPS_ROWS and result.shape[:1] != tensor.shape[:1]:
            raise HookError(
                f"{where} made {result.shape[0]} rows of {tensor.shape[0]}; every row has a "
                "receiver, so their number must stay"
            )
        tensor = result
    return tensor
