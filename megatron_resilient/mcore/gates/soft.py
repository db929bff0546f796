"""SoftMoE (arXiv 2308.00951): experts work on mixtures of tokens instead of tokens.

    L = X Phi;   D = softmax(L) over tokens;   C = softmax(L) over mixtures;   Y = C f(D^T X)

for each sequence alone. f applies expert i to its own mixtures ("slots" in the paper; with us that
word means where an expert is stored). Nothing is chosen and nothing dropped; every output depends
on every token of its sequence.

Where a sequence is cut over ranks, softmax and D^T X are sums over them: `mixture_sums` gives one
rank's terms, which may be added up before `mixtures` divides them.

Shapes: N tokens of a sequence on this rank, B sequences, H hidden size, K = experts x mixtures per
expert, sorted by expert.
"""

import torch

from megatron_resilient.mcore.gates.widths import wide


def logits(hidden_NBH: torch.Tensor, phi_KH: torch.Tensor) -> torch.Tensor:
    """Returns L, [N, B, K], in at least fp32."""
    tokens_NBH = wide(hidden_NBH)
    return tokens_NBH @ phi_KH.to(tokens_NBH.dtype).t()


def mixture_sums(
    logits_NBK: torch.Tensor, hidden_NBH: torch.Tensor, highest_BK: torch.Tensor
) -> torch.Tensor:
    """Returns the terms of D^T X that this rank's tokens have. O(N B K H).

    Args:
        logits_NBK: L.
        hidden_NBH: X.
        highest_BK: largest logit over all tokens of the sequence, on whichever rank; a constant.

    Returns:
        [K x B, H + 1]: weighted sums of tokens, and in the last column of the weights.
    """
    weights_NBK = (logits_NBK - highest_BK).exp()
    tokens_NBH = wide(hidden_NBH)
    sums_KBH = torch.einsum("nbk,nbh->kbh", weights_NBK, tokens_NBH)
    totals_KB1 = weights_NBK.sum(dim=0).t().unsqueeze(-1)
    return torch.cat([sums_KBH, totals_KB1], dim=-1).flatten(0, 1)


def mixtures(sums_RH1: torch.Tensor) -> torch.Tensor:
    """Returns mixtures, [R, H], for rows of `mixture_sums` that were added up over all ranks."""
    return sums_RH1[:, :-1] / sums_RH1[:, -1:]


def combine(logits_NBK: torch.Tensor, outputs_KBH: torch.Tensor) -> torch.Tensor:
    """Returns Y = C f, [N, B, H], in the type of the logits.

    Args:
        logits_NBK: L.
        outputs_KBH: what the experts made of the mixtures.
    """
    weights_NBK = logits_NBK.softmax(dim=-1)
    return torch.einsum("nbk,kbh->nbh", weights_NBK, outputs_KBH.to(weights_NBK.dtype))


def load(logits_NBK: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns how many tokens each expert answers, [E]: sums of C, fp64 and not whole."""
    weights_NBK = logits_NBK.detach().softmax(dim=-1)
    return weights_NBK.sum(dim=(0, 1)).view(experts, -1).double().sum(dim=1)
