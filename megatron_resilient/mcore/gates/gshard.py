"""GShard's noisy top-k gate (arXiv 2006.16668; the noise: FSMoE, arXiv 2501.10714, section 2.1).

    h_i = (x W_g)_i + N(0, 1) * softplus((x W_noise)_i)
    G   = softmax(KeepTopK(h, k)), where what is not kept counts as -inf

Shapes: T tokens, E experts.
"""

import torch
from torch.nn.functional import softplus

from megatron_resilient.mcore.gates.top_k import keep_top_k
from megatron_resilient.mcore.gates.widths import wide


def noisy(
    logits_TE: torch.Tensor, noise_logits_TE: torch.Tensor, normal_TE: torch.Tensor
) -> torch.Tensor:
    """Adds noise whose width the gate learns.

    Args:
        logits_TE: x W_g.
        noise_logits_TE: x W_noise.
        normal_TE: standard normal numbers; no gradient flows into them.

    Returns:
        h, [T, E], of the type of the logits.
    """
    width_TE = softplus(wide(noise_logits_TE))
    return (wide(logits_TE) + wide(normal_TE).detach() * width_TE).type_as(logits_TE)


def choose(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts and their weights, which add up to 1 for every token.

    Args:
        logits_TE: h, with noise or without.
        k: experts of a token.

    Returns:
        (weights [T, E] of the type of the logits, 0 where not chosen; routing map [T, E]).
    """
    map_TE = keep_top_k(logits_TE, k)
    kept_TE = wide(logits_TE).masked_fill(~map_TE, -torch.inf)
    return kept_TE.softmax(dim=1).type_as(logits_TE), map_TE
