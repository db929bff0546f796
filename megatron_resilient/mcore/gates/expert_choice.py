"""Expert Choice (arXiv 2202.09368): every expert takes the tokens that want it most.

    S = softmax(X W_g) over experts;   expert i takes the n k / E tokens with the largest S[:, i]

All experts get equally many tokens; a token may get none, or all of them. Which ones it gets
depends on the other tokens, later ones too. FSMoE (arXiv 2501.10714, section 2.1) prints the
softmax over the tokens that an expert keeps; this is the original paper's.

Shapes: T tokens, E experts.
"""

import torch

from megatron_resilient.mcore.gates.widths import wide


def scores(logits_TE: torch.Tensor) -> torch.Tensor:
    """Returns S, [T, E], in at least fp32: each token's wishes, which add up to 1."""
    return wide(logits_TE).softmax(dim=1)


def capacity(tokens: int, experts: int, experts_per_token: int) -> int:
    """Returns how many tokens an expert takes: its part of tokens x experts_per_token.

    Rounded down, at least one and at most all.
    """
    return max(1, min(tokens, tokens * experts_per_token // experts))


def choose(scores_TE: torch.Tensor, tokens_per_expert: int) -> torch.Tensor:
    """Returns the routing map, bool [T, E], with `tokens_per_expert` True in each column."""
    chosen = scores_TE.detach().topk(tokens_per_expert, dim=0).indices
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(0, chosen, True)
