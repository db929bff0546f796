"""Runs empty microbatches without weight: in the loss, in auxiliary losses, in every count.

An empty microbatch is run because the other ranks need this rank in their collectives. Its loss is
multiplied by zero, its routers send no token and attach no auxiliary loss. Which microbatch is in
progress is noted when its forward pass begins, and again when its backward pass does: activations
that are recomputed then go through the routers once more.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import nn

from megatron_resilient.algorithms.microbatches import Microbatches
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.gates.soft_router import SoftRouter

_is_empty = False  # the microbatch whose layers run now


class WeighedForwardStep:
    """A forward_step_func that gives each microbatch its weight.

    One object serves one call of Megatron's train_step or evaluate.

    Args:
        forward_step: the user's.
        layout: how the step is cut.
        rank: data-parallel rank.
        per_token: whether Megatron divides the summed loss by the tokens of the step.
    """

    def __init__(
        self, forward_step: Callable[..., tuple], layout: Microbatches, rank: int, per_token: bool
    ):
        self._forward_step = forward_step
        self._layout = layout
        self._rank = rank
        self._weight = 1.0 if per_token else layout.weight
        self._calls: Counter[nn.Module] = Counter()  # by model chunk

    def __call__(self, data_iterator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        """Runs the next microbatch of a model chunk."""
        # An evaluation has many steps, and a step that is validated is run again.
        index = self._calls[model] % self._layout.per_rank
        self._calls[model] += 1
        is_real = self._layout.is_real(self._rank, index)
        _begin(not is_real)
        output, loss = self._forward_step(data_iterator, model, *args, **kwargs)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: _begin(not is_real))
        return output, loss and partial(self._weigh, loss, is_real)

    def _weigh(self, loss_func: Callable[..., Any], is_real: bool, output: Any, **kwargs: Any):
        result = loss_func(output, **kwargs)
        if kwargs.get("non_loss_data"):
            return result
        loss, *tokens, logged = result
        if not is_real:
            tokens = [torch.zeros_like(count) for count in tokens]
        weight = self._weight if is_real else 0.0
        if weight != 1:
            loss = loss * weight
        return (loss, *tokens, {key: self._logged(v, is_real) for key, v in logged.items()})

    def _logged(self, value: torch.Tensor, is_real: bool) -> torch.Tensor:
        if value.numel() != 1:  # [loss, tokens], both to be summed
            return value if is_real else torch.zeros_like(value)
        # To be averaged over the microbatches of this rank. A rank that has none leaves it.
        own = self._layout.real_on(self._rank)
        return value * (self._layout.per_rank * is_real / own) if own else value


def end() -> None:
    """Says that no microbatch runs any more."""
    _begin(False)


def _begin(is_empty: bool) -> None:
    global _is_empty
    _is_empty = is_empty


def attach(model: list[nn.Module]) -> None:
    """Makes the layers of a model skip what an empty microbatch must not do.

    Raises:
        ConfigError: a router or dispatcher for which that is not known.
    """
    for chunk in model:
        for layer in (m for m in chunk.modules() if isinstance(m, MoELayer)):
            router, dispatcher = layer.router, layer.token_dispatcher
            if not isinstance(router, TopKRouter):
                raise ConfigError(
                    f"{type(router).__name__}: a router that is not a TopKRouter cannot skip the "
                    "empty microbatches of a world that does not divide the batch"
                )
            router.forward = partial(_route, router, router.forward)
            if isinstance(router, SoftRouter):
                continue  # mixtures are sent as ever
            if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
                dispatcher.preprocess = partial(_count, dispatcher, dispatcher.preprocess)
        if get_model_config(chunk).mtp_num_layers:
            inner = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
            inner.register_forward_pre_hook(_mask_loss, with_kwargs=True)


def _route(router: TopKRouter, route: Callable[..., tuple], hidden: torch.Tensor, *rest: Any):
    """Routes; in an empty microbatch sends no token anywhere.

    The probabilities stay part of the graph: backward passes have collectives too.
    """
    if not _is_empty:
        return route(hidden, *rest)
    if isinstance(router, SoftRouter):  # of a loss of weight zero there are gradients of zero
        result = route(hidden, *rest)
        router.without_load()
        return result
    logits_TE = router.gating(hidden).view(-1, router.config.num_moe_experts)
    if router.training and torch.is_grad_enabled():
        _log_nothing(router)
    return logits_TE * 0, torch.zeros_like(logits_TE, dtype=torch.bool)


def _log_nothing(router: TopKRouter) -> None:
    """Makes the entries of the metrics that this router would log.

    A rank whose microbatches are all empty must join their reductions.
    """
    config = router.config
    layers, number = config.num_layers, router.layer_number
    if router.is_mtp_layer:
        number += layers
    layers += config.mtp_num_layers or 0
    nothing = torch.zeros((), device=router.weight.device)
    record = partial(get_moe_metrics_tracker().record, value=nothing)
    if config.moe_z_loss_coeff is not None:
        record("z_loss", layer_number=number, num_layers=layers, avg_group=router.tp_dp_cp_group)
    for loss, name in (
        ("aux_loss", "load_balancing_loss"),
        ("seq_aux_loss", "seq_load_balancing_loss"),
    ):
        if router.get_aux_loss_coeff(loss) > 0:
            record(name, layer_number=number, num_layers=layers, reduce_group=router.tp_cp_group)


def _count(dispatcher: Any, preprocess: Callable[..., Any], routing_map: torch.Tensor) -> Any:
    """Counts the tokens of each expert; without dropping Megatron takes top-k each for granted."""
    result = preprocess(routing_map)
    if _is_empty:
        dispatcher.num_out_tokens = 0
    return result


def _mask_loss(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Hides all tokens of an empty microbatch from the losses of multi-token prediction."""
    like = kwargs.get("loss_mask")
    if like is None:
        like = kwargs.get("labels")
    if not _is_empty or like is None:
        return None
    return args, {**kwargs, "loss_mask": torch.zeros_like(like)}
