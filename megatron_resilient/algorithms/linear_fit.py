"""A line through measured times that a few disturbed measurements do not bend."""

from collections.abc import Sequence
from math import fsum  # exactly rounded: a sum by numpy differs between processors

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.cost_model import FitQuality, LinearCost
from megatron_resilient.errors import ProfileError

FloatArray = npt.NDArray[np.float64]

# Residuals beyond this many robust standard deviations are taken for disturbances. 1.4826 makes a
# standard deviation of the median of absolute residuals, for a normal distribution.
_OUTLIER_SIGMAS = 3.0
_SIGMA_OF_MEDIAN = 1.4826
# Below this relative residual nothing is a disturbance: it would be rounding.
_EXACT = 1e-6
# Pairs of sizes tried: more sizes than this are thinned out evenly, which changes nothing visible.
_MAX_SIZES = 200


def fit_linear(units: Sequence[float], times_ms: Sequence[float]) -> tuple[LinearCost, FitQuality]:
    """Fits `alpha + beta * n` with alpha >= 0 and beta > 0.

    Repeated sizes count once, with their median time. The line is the one with the least sum of
    absolute *relative* residuals (it passes through two of the points, or through one and the
    origin, so all of those are tried), then polished by least squares over the sizes that it does
    not call disturbed. Relative, because the chunks that are planned for are small, and plain least
    squares looks at the large sizes alone. For the linear model of FSMoE (arXiv 2501.10714),
    section 4.1. O(S^3) for S distinct sizes; the same on every rank for the same numbers.

    Args:
        units: Size of each measurement (bytes, or floating-point operations), [N].
        times_ms: Its milliseconds, [N].

    Returns:
        The cost, and how well it fits (R2 over all measurements, errors over the sizes' medians).

    Raises:
        ProfileError: Fewer than two sizes, a time or size that is not positive and finite, or times
            that do not grow with the size.
    """
    sizes, medians, all_sizes, all_times = _medians(units, times_ms)
    chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MAX_SIZES)).round())
    kept = chosen.astype(int)
    alpha, beta = _least_absolute(sizes[kept], medians[kept])
    alpha, beta = _polished(sizes, medians, alpha, beta)
    if not beta > 0:
        raise ProfileError(
            f"times do not grow from {sizes[0]:.4g} to {sizes[-1]:.4g} units: "
            "measure larger sizes, or repeat on an idle machine"
        )
    errors = np.abs((alpha + beta * sizes) / medians - 1)
    worst = int(np.argmax(errors))
    quality = FitQuality(
        _r2(all_times, alpha + beta * all_sizes),
        float(errors[worst]),
        float(sizes[worst]),
        float(sizes[0]),
    )
    return LinearCost(alpha, beta), quality


def _medians(
    units: Sequence[float], times_ms: Sequence[float]
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    all_sizes, all_times = np.asarray(units, dtype=float), np.asarray(times_ms, dtype=float)
    if all_sizes.ndim != 1 or all_sizes.shape != all_times.shape:
        raise ProfileError(f"{all_sizes.size} sizes and {all_times.size} times do not go together")
    for what, values in (("size", all_sizes), ("time", all_times)):
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise ProfileError(
                f"measurement {bad[0]}: {what} is {values[bad[0]]}: it must be a finite number > 0"
            )
    sizes = np.unique(all_sizes)
    if len(sizes) < 2:
        raise ProfileError(f"{len(sizes)} distinct sizes: a line needs at least two")
    medians = np.array([np.median(all_times[all_sizes == size]) for size in sizes])
    return sizes, medians, all_sizes, all_times


def _least_absolute(sizes: FloatArray, times: FloatArray) -> tuple[float, float]:
    first, second = np.triu_indices(len(sizes), 1)
    beta = (times[second] - times[first]) / (sizes[second] - sizes[first])
    alpha = times[first] - beta * sizes[first]
    allowed = (alpha >= 0) & (beta > 0)
    # Lines through the origin stand first: of equal ones the simpler is taken.
    alphas = np.concatenate([np.zeros(len(sizes)), alpha[allowed]])
    betas = np.concatenate([times / sizes, beta[allowed]])
    total = np.zeros(len(alphas))
    for size, time in zip(sizes, times, strict=True):
        total += np.abs((alphas + betas * size) / time - 1)
    best = int(np.argmin(total))
    if np.ptp(times) <= _EXACT * times.max():
        return float(times[0]), 0.0
    return float(alphas[best]), float(betas[best])


def _polished(
    sizes: FloatArray, times: FloatArray, alpha: float, beta: float
) -> tuple[float, float]:
    """Returns the relative least-squares line over the sizes that the given line explains."""
    if not beta > 0:
        return alpha, beta
    residuals = np.abs((alpha + beta * sizes) / times - 1)
    limit = max(_EXACT, _OUTLIER_SIGMAS * _SIGMA_OF_MEDIAN * float(np.median(residuals)))
    good = residuals <= limit
    if good.sum() < 3:
        return alpha, beta
    # Rows of (1, n) / t against 1: least squares of relative residuals. Sizes are scaled so that
    # both columns are of one magnitude.
    scale = float(sizes.max())
    ones, slopes = 1 / times[good], sizes[good] / scale / times[good]
    a11, a12, a22 = fsum(ones * ones), fsum(ones * slopes), fsum(slopes * slopes)
    b1, b2 = fsum(ones), fsum(slopes)
    determinant = a11 * a22 - a12 * a12
    if determinant <= 1e-12 * a11 * a22:
        return alpha, beta
    fitted_alpha = (b1 * a22 - b2 * a12) / determinant
    fitted_beta = (a11 * b2 - a12 * b1) / determinant
    if fitted_alpha < 0:
        fitted_alpha, fitted_beta = 0.0, b2 / a22
    if fitted_beta <= 0:
        return alpha, beta
    return fitted_alpha, fitted_beta / scale


def _r2(times: FloatArray, predicted: FloatArray) -> float:
    spread = fsum((times - fsum(times) / len(times)) ** 2)
    missed = fsum((times - predicted) ** 2)
    return 1 - missed / spread if spread > 0 else float(missed == 0)
