"""Which nodes are slow but alive: they are busy while the others wait for them."""

from collections.abc import Mapping
from statistics import median

# Below this share a node waits nearly all the time, and ratios of such shares say nothing.
_LEAST_SHARE = 0.05


class Stragglers:
    """Compares the nodes' busy shares, window after window."""

    def __init__(self, ratio: float, windows: int) -> None:
        """Starts without any.

        Args:
            ratio: A node is slow in a window if its share is over so many times the median.
            windows: It is a straggler after so many windows in a row.
        """
        self._ratio, self._windows = ratio, windows
        self._slow: dict[str, int] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stragglers."""
        return tuple(sorted(n for n, count in self._slow.items() if count >= self._windows))

    def judge(self, shares: Mapping[str, float]) -> tuple[tuple[str, ...], float]:
        """Takes one window.

        Args:
            shares: For each node, the share of time outside collectives, 0 to 1.

        Returns:
            The nodes that became stragglers with it, and the median share.
        """
        middle = median(shares.values()) if shares else 0.0
        before = self.nodes
        self._slow = {
            node: self._slow.get(node, 0) + 1
            for node, share in shares.items()
            if share > max(_LEAST_SHARE, self._ratio * middle)
        }
        return tuple(node for node in self.nodes if node not in before), middle
