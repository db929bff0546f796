"""Who keeps a second copy of whose dense optimizer shard."""

from collections.abc import Sequence


def guardian_shift(nodes: Sequence[str]) -> int | None:
    """Returns k such that rank i + k (modulo the ranks) is always on another node than rank i.

    Args:
        nodes: node of every rank of a group.

    Returns:
        The smallest such number; None if there is none.
    """
    ranks = len(nodes)
    for shift in range(1, ranks):
        if all(nodes[i] != nodes[(i + shift) % ranks] for i in range(ranks)):
            return shift
    return None
