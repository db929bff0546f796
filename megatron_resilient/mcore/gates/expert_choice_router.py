"""Expert Choice as a Megatron router."""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter

from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.gates import expert_choice


class ExpertChoiceRouter(TopKRouter):
    """Every expert takes equally many tokens of a microbatch; `moe_router_topk` is their mean.

    The tokens that compete are all of the microbatch, on all tensor-parallel ranks that share it:
    the choice is the same in every layout and in every world.
    """

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Has the experts choose. Collective over the tensor-parallel group.

        One all-gather of tokens x experts scores, where a sequence is cut.

        Args:
            logits: [sequence, batch, experts].
            padding_mask: must be None.

        Returns:
            (weights [T, E], routing map [T, E]); a token may have from no to all experts.

        Raises:
            ConfigError: there is a padding mask.
        """
        if padding_mask is not None:
            raise ConfigError(
                f"--resilient-gate expert-choice: layer {self.layer_number} got a padding mask, "
                "and experts would choose padding; use a gate by which tokens choose"
            )
        logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
        scores_TE = expert_choice.scores(logits)
        own, experts = scores_TE.shape
        with torch.no_grad():
            every, first = scores_TE.detach(), 0
            if self.config.sequence_parallel and self.tp_group.size() > 1:
                every = gather_from_sequence_parallel_region(every, group=self.tp_group)
                first = self.tp_group.rank() * own
            taken = expert_choice.capacity(every.shape[0], experts, self.topk)
            map_TE = expert_choice.choose(every, taken)[first : first + own].contiguous()
        return scores_TE.masked_fill(~map_TE, 0.0).type_as(logits), map_TE
