"""SoftMoE as a Megatron router: what it hands on to experts are mixtures of tokens.

The mixtures are dispatched as tokens are, each to the one expert that it is for, with weight 1.
Where a sequence is cut over tensor-parallel ranks, each of them sends its part of the mixtures.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import TopKRouter

from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.gates import soft
from megatron_resilient.mcore.gates.routers import router_parameter


@dataclass(frozen=True, eq=False)
class Mixture:
    """What one microbatch's tokens of this rank became.

    Attributes:
        tokens_R1H: this rank's mixtures, in the place of tokens.
        logits_NBK: what they are combined by.
        group: ranks that share the sequences, None where this one has them whole.
    """

    tokens_R1H: torch.Tensor
    logits_NBK: torch.Tensor
    group: dist.ProcessGroup | None

    def combine(self, outputs_R1H: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output, [N, B, H], of what experts made of the mixtures. Collective.

        One all-gather of the mixtures, where a sequence is cut.
        """
        outputs_RH = outputs_R1H.flatten(0, 1)
        if self.group is not None:
            outputs_RH = gather_from_sequence_parallel_region(outputs_RH, group=self.group)
        _, batch, mixtures = self.logits_NBK.shape
        outputs_KBH = outputs_RH.view(mixtures, batch, -1)
        return soft.combine(self.logits_NBK, outputs_KBH).type_as(outputs_R1H)


class SoftRouter(TopKRouter):
    """Mixes tokens; `weight` is Phi, [E x mixtures per expert, H].

    Args:
        *args: TopKRouter's.
        mixtures_per_expert: of each sequence.
        **kwargs: TopKRouter's.
    """

    def __init__(self, *args: Any, mixtures_per_expert: int, **kwargs: Any):
        """Builds the router; see the class."""
        super().__init__(*args, **kwargs)
        config = self.config
        phi = torch.empty(config.num_moe_experts * mixtures_per_expert, config.hidden_size)
        if config.perform_initialization:
            config.init_method(phi)
        self.weight = router_parameter(phi, config)
        self.bias = None
        self._mixture: Mixture | None = None
        self._load: torch.Tensor | None = None

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Mixes tokens. Collective over the tensor-parallel group.

        One all-reduce of K x B numbers and one reduce-scatter of K x B x (H + 1) fp32, where a
        sequence is cut.

        Args:
            input: [N, B, H].
            padding_mask: must be None.

        Returns:
            (weights [R, E]: 1 for the expert of a mixture; routing map [R, E]) for R mixtures.

        Raises:
            ConfigError: there is a padding mask.
        """
        if padding_mask is not None:
            raise ConfigError(
                f"--resilient-gate soft: layer {self.layer_number} got a padding mask, and padding "
                "would be mixed in; use a gate by which tokens choose"
            )
        hidden = self.apply_input_jitter(input)
        logits = soft.logits(hidden, self.weight)
        is_part = self.config.sequence_parallel and self.tp_group.size() > 1
        group = self.tp_group if is_part else None
        highest = logits.detach().amax(dim=0)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        sums = soft.mixture_sums(logits, hidden, highest)
        every = sums.shape[0]
        if group is not None:
            sums = reduce_scatter_to_sequence_parallel_region(sums, group=group)
        own = sums.shape[0]
        tokens = soft.mixtures(sums).type_as(input).unsqueeze(1)
        self._mixture = Mixture(tokens, logits, group)
        experts = self.config.num_moe_experts
        self._load = soft.load(logits, experts)
        first = 0 if group is None else group.rank() * own
        rows = torch.arange(first, first + own, device=input.device)
        routing_map = torch.nn.functional.one_hot(rows // (every // experts), experts).bool()
        return routing_map.to(logits.dtype), routing_map

    def take(self) -> Mixture:
        """Returns what `forward` mixed, once: it holds a graph."""
        mixture, self._mixture = self._mixture, None
        assert mixture is not None
        return mixture

    def expert_load(self) -> torch.Tensor:
        """Returns how many of the last microbatch's tokens each expert answers, [E], fp64."""
        assert self._load is not None
        return self._load

    def without_load(self) -> None:
        """Has the last microbatch count nothing: it was an empty one."""
        self._load = torch.zeros_like(self.expert_load())
