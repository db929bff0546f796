"""Counts the tokens that each router sends to each logical expert."""

from typing import Any

import torch
from torch import nn


class ExpertLoad:
    """Tokens per layer and logical expert since the last reading.

    Counting is one addition per MoE layer and microbatch on the device: no copy to the host and no
    communication before `take` is called.
    """

    def __init__(self, model_chunks: list[nn.Module]):
        from megatron.core.transformer.moe.router import TopKRouter

        self._routers = [
            module
            for chunk in model_chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter)
        ]
        self._routers.sort(key=layer_number)
        self._counts: dict[int, torch.Tensor] = {}
        self._handles = [r.register_forward_hook(self._count) for r in self._routers]

    @property
    def layers(self) -> list[int]:
        """Numbers of the MoE layers on this rank, from 1, ascending.

        Those of multi-token prediction follow the model's own.
        """
        return [layer_number(router) for router in self._routers]

    def _count(self, router: nn.Module, inputs: tuple, output: tuple) -> None:
        # A recomputed layer runs twice: first without gradients, then with. Evaluation runs in
        # eval mode. What is left is each training token once.
        if not (router.training and torch.is_grad_enabled()):
            return
        # A gate without a choice says itself what it counts.
        own = getattr(router, "expert_load", None)
        tokens = output[1].detach().sum(dim=0) if own is None else own()
        layer = layer_number(router)
        known = self._counts.get(layer)
        self._counts[layer] = tokens if known is None else known + tokens

    def own(self) -> dict[int, torch.Tensor]:
        """Returns {layer: tokens per expert} of this rank alone, and starts anew. Local."""
        counts, self._counts = self._counts, {}
        return {layer: _whole(tokens) for layer, tokens in counts.items()}

    def take(self, group: "torch.distributed.ProcessGroup") -> dict[int, list[int]]:
        """Returns {layer: tokens per expert} summed over `group` and starts anew.

        Collective over `group`, whose ranks must hold the same layers. One all-reduce of
        layers x experts numbers.
        """
        if not self._counts:
            return {}
        layers = sorted(self._counts)
        total = torch.stack([self._counts[layer] for layer in layers])
        torch.distributed.all_reduce(total, group=group)
        self._counts.clear()
        return dict(zip(layers, _whole(total).tolist(), strict=True))

    def remove(self) -> None:
        """Detaches the hooks from the model."""
        for handle in self._handles:
            handle.remove()


def _whole(tokens: torch.Tensor) -> torch.Tensor:
    """Returns tokens as int64: a gate that mixes them has shares of them."""
    return (tokens.round() if tokens.is_floating_point() else tokens).to(torch.int64)


def layer_number(router: Any) -> int:
    """Returns the number of a router's layer; multi-token prediction's follow the model's own."""
    first = router.config.num_layers if router.is_mtp_layer else 0
    return int(first + router.layer_number)
