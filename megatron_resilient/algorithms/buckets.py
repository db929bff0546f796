"""Which neighbours are sent together: few messages of a good size."""

from collections.abc import Sequence


def consecutive_buckets(sizes: Sequence[int], least: int) -> list[list[int]]:
    """Puts consecutive items together until they are large enough to be sent.

    Args:
        sizes: of the items, in the order in which they become ready; any unit.
        least: size from which a bucket is full, in the same unit; the last one may stay smaller.

    Returns:
        Indices of the items by bucket, O(items). Each bucket is as short as it can be, so that it
        is ready as early as it can be.
    """
    buckets: list[list[int]] = []
    filled = least
    for index, size in enumerate(sizes):
        if filled >= least:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
