"""Gates by which every token chooses k experts, as Megatron routers.

They are TopKRouters: auxiliary losses, z-loss, token dropping, jitter, counting, checkpoints and
recomputation treat them as Megatron's own. What they hold is dense state, the same on all ranks.
"""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    router_gating_linear,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_resilient.mcore.gates import gshard, sigmoid, xmoe


def router_parameter(values: torch.Tensor, config: TransformerConfig) -> nn.Parameter:
    """Makes a parameter that is treated as Megatron treats a router's weight.

    With sequence parallelism a tensor-parallel rank routes a part of the tokens, so that Megatron
    has to sum gradients over these ranks.
    """
    parameter = nn.Parameter(values.to(config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def router_dtype(config: TransformerConfig, hidden: torch.Tensor) -> torch.dtype:
    """Returns the type in which Megatron has a router compute."""
    named = {"fp32": torch.float32, "fp64": torch.float64}
    return named.get(config.moe_router_dtype, hidden.dtype)


class ChoosingRouter(TopKRouter):
    """A router whose weights of experts are those of a formula of ours."""

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (weights [T, E], routing map [T, E]) with k experts a token."""
        raise NotImplementedError

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Chooses experts and attaches auxiliary losses, as Megatron does for its own choice.

        Args:
            logits: [sequence, batch, experts].
            padding_mask: [sequence, batch], True where a token is padding: it counts in no loss.

        Returns:
            (weights [T, E], routing map [T, E]).
        """
        length, batch = logits.shape[:2]
        logits = logits.view(-1, self.config.num_moe_experts)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding)
        probs, routing_map = self.choose(logits)
        factor = self.config.moe_expert_capacity_factor
        if factor is not None:
            probs, routing_map = apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            chosen, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, padding_mask=padding
            )
            masked = {"with_padding_mask": padding is not None}
            probs = self._apply_aux_loss(probs, scores, chosen, **masked)
            probs = self._apply_seq_aux_loss(probs, scores, chosen, length, batch, **masked)
            probs = self._apply_global_aux_loss(probs, scores, chosen, **masked)
        return probs, routing_map


class GShardRouter(ChoosingRouter):
    """GShard's noisy top-k gate; the noise is there in training only.

    Its weights begin at zero: noise of width ln 2, and no random number that would shift those of
    later layers.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.noise_weight = router_parameter(
            torch.zeros(self.config.num_moe_experts, self.config.hidden_size), self.config
        )

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns h, [sequence, batch, experts]."""
        logits = super().gating(input)
        if not self.training:
            return logits
        noise = router_gating_linear(
            input, self.noise_weight, None, router_dtype(self.config, input)
        )
        # As Megatron's dropout does: a stream of its own for each part of a sequence, and one that
        # recomputation sets back.
        is_part = self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if is_part else nullcontext():
            normal = torch.randn_like(logits)
        return gshard.noisy(logits, noise, normal)

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the softmax over the kept logits."""
        return gshard.choose(logits_TE, self.topk)


class SigmoidRouter(ChoosingRouter):
    """The gate of BASE layers and StableMoE."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.score_function = "sigmoid"  # of auxiliary losses

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sigmoids of the kept logits."""
        return sigmoid.choose(logits_TE, self.topk)


class XMoERouter(ChoosingRouter):
    """X-MoE's cosine gate: `weight` has the experts' embeddings, [E, D].

    Args:
        *args: TopKRouter's.
        dimensions: D.
        temperature: tau at the start.
        **kwargs: TopKRouter's.
    """

    def __init__(self, *args: Any, dimensions: int, temperature: float, **kwargs: Any):
        """Builds the router; see the class."""
        super().__init__(*args, **kwargs)
        config = self.config
        projection = torch.empty(dimensions, config.hidden_size)
        embeddings = torch.empty(config.num_moe_experts, dimensions)
        if config.perform_initialization:
            config.init_method(projection)
            config.init_method(embeddings)
        self.projection = router_parameter(projection, config)
        self.weight = router_parameter(embeddings, config)
        start = torch.tensor([temperature], dtype=torch.float32).log()
        self.log_temperature = router_parameter(start, config)
        self.bias = None

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Returns s, [sequence, batch, experts]."""
        projected = router_gating_linear(
            input, self.projection, None, router_dtype(self.config, input)
        )
        return xmoe.cosine_logits(projected, self.weight, self.log_temperature)

    def choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the softmax over all logits, for the kept ones."""
        return xmoe.choose(logits_TE, self.topk)
