"""Where an optimizer keeps what belongs to a parameter."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn


def state_tensors(optimizer: Any, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Returns what moves with a parameter besides itself: its fp32 copy and its moments.

    Scalars such as AdamW's step are left out: they are the same for all parameters of a group.

    Args:
        optimizer: Megatron's ChainedOptimizer or one of those in it.
        parameter: a parameter of the model.

    Returns:
        {name: tensor}: `main` where there is a separate fp32 copy, then the moments that exist
        (none before the first step). Moments and copy have the parameter's elements in its order.

    Raises:
        KeyError: no optimizer has the parameter.
    """
    single, main = _owner(optimizer, parameter)
    # In fp32 the optimizer's copy is the model's parameter itself, or a view of it.
    tensors = {} if main.data_ptr() == parameter.data_ptr() else {"main": main.data}
    state = single.optimizer.state.get(main, {})
    for name in sorted(state):
        if isinstance(state[name], torch.Tensor) and state[name].numel() == main.numel() > 1:
            tensors[name] = state[name]
    return tensors


def tag_shared(optimizer: Any, parameter: nn.Parameter) -> None:
    """Gives the optimizer's copy of a parameter its `shared` mark: norms are taken over copies."""
    _, main = _owner(optimizer, parameter)
    main.shared = parameter.shared  # type: ignore[attr-defined]


def single_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers in Megatron's ChainedOptimizer; one that is not chained is its own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _owner(optimizer: Any, parameter: nn.Parameter) -> tuple[Any, torch.Tensor]:
    """Returns the single optimizer that has a parameter, and the tensor that it steps."""
    for single in single_optimizers(optimizer):
        main = _main_parameter(single, parameter)
        if main is not None:
            return single, main
    raise KeyError("no optimizer has this parameter")


def _main_parameter(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns the tensor that the inner optimizer steps for a model parameter."""
    if isinstance(optimizer, DistributedOptimizer):
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, position = optimizer.model_param_group_index_map[parameter]
        main: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][position]
        return main
    own = getattr(parameter, "main_param", None)
    wanted = parameter if own is None else own
    for group in optimizer.optimizer.param_groups:
        if any(candidate is wanted for candidate in group["params"]):
            return wanted
    return None
