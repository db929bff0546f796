"""The sigmoid gate of BASE layers (arXiv 2103.16716) and StableMoE (arXiv 2204.08396).

    h_i = (x W_g)_i;   G_i = sigmoid(h_i) for the k largest h_i, else 0

Weights are not made to add up to 1: an expert's weight does not depend on the other experts. BASE
also solves a balanced assignment, and StableMoE has a stage with a fixed router: neither is here.

Shapes: T tokens, E experts.
"""

import torch

from megatron_resilient.mcore.gates.top_k import keep_top_k
from megatron_resilient.mcore.gates.widths import wide


def choose(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts and their weights.

    Args:
        logits_TE: h.
        k: experts of a token.

    Returns:
        (weights [T, E] of the type of the logits, 0 where not chosen; routing map [T, E]).
    """
    map_TE = keep_top_k(logits_TE, k)
    weights_TE = wide(logits_TE).sigmoid().masked_fill(~map_TE, 0.0)
    return weights_TE.type_as(logits_TE), map_TE
