"""Counts of lost node sets by their size, as polynomials packed into integers."""

from math import comb


class LossPolynomials:
    """Arithmetic of polynomials whose coefficient of x^k counts sets of k lost nodes.

    A polynomial is one integer with a fixed number of bits per coefficient (Kronecker
    substitution), cut off after x^max_losses: sums are integer sums, products are `times`.

    Attributes:
        nodes: Most nodes that a polynomial may stand for; bounds the coefficients.
        max_losses: Highest power kept.
    """

    def __init__(self, nodes: int, max_losses: int) -> None:
        self.nodes = nodes
        self.max_losses = max_losses
        self._width = comb(nodes, min(max_losses, nodes // 2)).bit_length()
        self._keep = (1 << self._width * (max_losses + 1)) - 1
        self._anything: dict[int, int] = {}

    def all_lost(self, nodes: int) -> int:
        """Returns x^nodes: the one way to lose all of them."""
        return 1 << self._width * nodes & self._keep

    def anything(self, nodes: int) -> int:
        """Returns (1 + x)^nodes: all ways to lose some or none of them."""
        if nodes not in self._anything:
            self._anything[nodes] = sum(
                comb(nodes, k) << self._width * k for k in range(min(nodes, self.max_losses) + 1)
            )
        return self._anything[nodes]

    def some_kept(self, nodes: int) -> int:
        """Returns all ways but the one to lose all of them."""
        return self.minus(self.anything(nodes), self.all_lost(nodes))

    def times(self, one: int, other: int) -> int:
        """Returns the product; the two must be about different nodes."""
        return one * other & self._keep

    def minus(self, one: int, other: int) -> int:
        """Returns the difference; no coefficient of it may be negative."""
        return one - other & self._keep

    def coefficients(self, polynomial: int) -> list[int]:
        """Returns the counts for 0, 1, .. max_losses lost nodes."""
        one = (1 << self._width) - 1
        return [polynomial >> self._width * k & one for k in range(self.max_losses + 1)]

    def lowest_difference(self, one: int, other: int) -> tuple[int, int] | None:
        """Returns both counts for the smallest number of lost nodes where they differ, if any."""
        if one == other:
            return None
        lowest_bit = ((one ^ other) & -(one ^ other)).bit_length() - 1
        start = lowest_bit - lowest_bit % self._width
        mask = (1 << self._width) - 1
        return one >> start & mask, other >> start & mask
