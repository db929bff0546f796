"""The choice that most gates share: every token keeps its k largest scores."""

import torch


def keep_top_k(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """Marks the k largest scores of each row.

    Args:
        scores_TE: [tokens, experts]; O(tokens x experts).
        k: marks per row, at most the number of experts.

    Returns:
        bool, [tokens, experts], k True in each row.
    """
    chosen = scores_TE.detach().topk(k, dim=1).indices
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen, True)
