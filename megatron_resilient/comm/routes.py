"""By which ranks the rows from one rank to another travel: three ways, equal in what arrives.

Rows that rank s has for rank d are a block. `direct` sends each block at once. The two hierarchical
ways (FSMoE, arXiv 2501.10714, section 3.2, names 1DH and 2DH) send fewer, larger messages between
nodes: `1d` over the first rank of each node, `2d` over the rank of the sender's node that has the
destination's local index, so that all ranks take part in what goes between nodes. Blocks between
ranks of one node never leave it.
"""

from collections.abc import Sequence

import numpy as np

from megatron_resilient.errors import ConfigError

DIRECT, ONE_D, TWO_D = "direct", "1d", "2d"
ALGORITHMS = DIRECT, ONE_D, TWO_D
WHOLE, INTRA, INTER = "whole", "intra", "inter"


def stops(algorithm: str, nodes: Sequence[Sequence[int]]) -> tuple[list[str], np.ndarray]:
    """Returns where each block is before the first hop and after each.

    Args:
        algorithm: one of ALGORITHMS.
        nodes: the ranks of each node.

    Returns:
        The kind of group of each hop (WHOLE, INTRA or INTER), and [hops + 1, ranks, ranks] ranks:
        the holder of the block from s to d; the first is s, the last d. O(hops x ranks^2).

    Raises:
        ConfigError: no such algorithm, or 2d with nodes of different sizes.
    """
    ranks = sum(map(len, nodes))
    source, target = np.indices((ranks, ranks))
    if algorithm == DIRECT:
        return [WHOLE], np.stack([source, target])
    node, local = np.empty(ranks, int), np.empty(ranks, int)
    for number, members in enumerate(nodes):
        node[list(members)] = number
        local[list(members)] = range(len(members))
    first = np.array([members[0] for members in nodes])
    inside = node[source] == node[target]
    if algorithm == ONE_D:
        out = np.where(inside, target, first[node[source]])
        into = np.where(inside, target, first[node[target]])
        return [INTRA, INTER, INTRA], np.stack([source, out, into, target])
    if algorithm == TWO_D:
        if len({len(members) for members in nodes}) > 1:
            raise ConfigError(
                f"dispatch by 2d wants as many ranks on every node, not "
                f"{sorted({len(members) for members in nodes})}: use 1d or direct"
            )
        out = np.array([list(members) for members in nodes])[node[source], local[target]]
        return [INTRA, INTER], np.stack([source, out, target])
    raise ConfigError(f"no dispatch algorithm {algorithm!r}: one of {', '.join(ALGORITHMS)}")
