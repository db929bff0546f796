"""The cosine gate of X-MoE (arXiv 2204.09179): against the collapse of tokens onto experts.

    s_i = cos(W_proj x, e_i) / tau;   G = softmax(s), kept for the k largest s_i, else 0

W_proj maps to few dimensions, e_i is the embedding of expert i there, and the temperature tau is
learned: as exp(log_temperature), so that it stays positive.

Shapes: T tokens, E experts, D dimensions of the projection; leading dimensions of tokens may be
several.
"""

import torch
from torch.nn.functional import normalize

from megatron_resilient.mcore.gates.top_k import keep_top_k
from megatron_resilient.mcore.gates.widths import wide


def cosine_logits(
    projected_TD: torch.Tensor, embeddings_ED: torch.Tensor, log_temperature: torch.Tensor
) -> torch.Tensor:
    """Returns s, [T, E], of the type of the projected tokens.

    Args:
        projected_TD: W_proj x; a token of zeros has cosine 0 with every expert.
        embeddings_ED: e_i.
        log_temperature: logarithm of tau, one element.
    """
    tokens_TD = normalize(wide(projected_TD), dim=-1)
    experts_ED = normalize(embeddings_ED.to(tokens_TD.dtype), dim=-1)
    cosines_TE = tokens_TD @ experts_ED.t()
    return (cosines_TE * (-log_temperature.to(tokens_TD.dtype)).exp()).type_as(projected_TD)


def choose(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts and their weights.

    Args:
        logits_TE: s.
        k: experts of a token.

    Returns:
        (weights [T, E] of the type of the logits, 0 where not chosen; routing map [T, E]).
    """
    map_TE = keep_top_k(logits_TE, k)
    weights_TE = wide(logits_TE).softmax(dim=1).masked_fill(~map_TE, 0.0)
    return weights_TE.type_as(logits_TE), map_TE
