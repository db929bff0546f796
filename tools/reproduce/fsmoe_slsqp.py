"""Algorithm 1 of the FSMoE paper (arXiv 2501.10714, section 4.3), as it is printed.

Four formulas of the degree r, each under its conditions, minimised over real r >= 1 by SLSQP; the
least of the four counts. Plans of this project try all integers instead (`pipelining.py`).
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from megatron_resilient.algorithms.stage_costs import StageCosts

# A case is a formula under any of some sets of conditions: names of Q1 to Q6, negated by "-". The
# seventh has the right side of the fifth.
_CASES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ("1", "-2", "4")),
    (1, ("1", "2", "5")),
    (1, ("-1", "-3", "6")),
    (1, ("-1", "3", "5")),
    (2, ("1", "2", "-5")),
    (2, ("-1", "3", "-5")),
    (3, ("1", "-2", "-4")),
    (4, ("-1", "-3", "-6")),
)
_TOLERANCE = 1e-6


def slsqp_degree(costs: StageCosts, slice_ms: float = 0.0, most: int = 16) -> float:
    """Returns the real degree that the algorithm finds, from 1 to `most`."""
    alpha, whole = np.array(costs.alpha_ms), np.array(costs.whole_ms)

    def parts(degree: float) -> tuple[float, float, float, float]:
        a2a, gather, expert, scatter, _ = alpha + whole / degree
        return float(a2a), float(gather), float(gather + scatter), float(degree * expert)

    def margin(condition: str) -> Callable[[np.ndarray], float]:
        """What has to be >= 0."""

        def value(at: np.ndarray) -> float:
            degree = float(at[0])
            a2a, gather, both, experts = parts(degree)
            ends = 2 * (degree - 1) * a2a
            left = {
                "1": a2a - gather,
                "2": experts - ends,
                "3": experts - (degree - 1) * both,
                "4": slice_ms - both,
                "5": slice_ms - (experts - ends + both),
                "6": slice_ms - (degree * both - ends),
            }[condition[-1]]
            return -left if condition.startswith("-") else left

        return value

    def time(case: int) -> Callable[[np.ndarray], float]:
        def value(at: np.ndarray) -> float:
            degree = float(at[0])
            a2a, _, both, experts = parts(degree)
            return (
                2 * degree * a2a + slice_ms,
                2 * a2a + both + experts,
                2 * degree * a2a + both,
                2 * a2a + degree * both,
            )[case - 1]

        return value

    best, chosen = np.inf, 1.0
    for case, conditions in _CASES:
        margins = [margin(own) for own in conditions]
        found = minimize(
            time(case),
            np.array([2.0]),
            method="SLSQP",
            bounds=[(1.0, float(most))],
            constraints=[{"type": "ineq", "fun": own} for own in margins],
        )
        if all(own(found.x) >= -_TOLERANCE for own in margins) and found.fun < best:
            best, chosen = float(found.fun), float(found.x[0])
    return min(max(chosen, 1.0), float(most))
