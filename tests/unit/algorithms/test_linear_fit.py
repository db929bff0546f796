import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resilient.algorithms.cost_model import FitQuality, LinearCost, Profile
from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.errors import ProfileError

SIZES = [2**power for power in range(12, 25)]


@given(st.floats(0, 10), st.floats(1e-9, 1e-3))
def test_a_line_is_found_again(alpha, beta):
    cost, quality = fit_linear(SIZES, [alpha + beta * size for size in SIZES])
    assert cost.time_ms(SIZES[0]) == pytest.approx(alpha + beta * SIZES[0], rel=1e-6)
    assert cost.time_ms(SIZES[-1]) == pytest.approx(alpha + beta * SIZES[-1], rel=1e-6)
    assert quality.r2 == pytest.approx(1)
    assert quality.max_relative_error < 1e-6
    assert quality.distrust() is None


@given(st.randoms(use_true_random=False), st.integers(1, 2))
def test_a_few_disturbed_measurements_do_not_bend_it(random, disturbed):
    times = [(0.3 + 2e-6 * size) * random.uniform(0.99, 1.01) for size in SIZES]
    for index in random.sample(range(len(SIZES)), disturbed):
        times[index] *= random.uniform(1.5, 20)
    cost, _ = fit_linear(SIZES, times)
    assert cost.alpha_ms == pytest.approx(0.3, rel=0.05)
    assert cost.beta == pytest.approx(2e-6, rel=0.04)


def test_repeats_count_once_by_their_median():
    sizes = [1000, 2000, 3000] * 3
    times = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 50.0, 2.0, 3.0]
    cost, quality = fit_linear(sizes, times)
    assert (cost.alpha_ms, cost.beta) == pytest.approx((0, 1e-3), abs=1e-9)
    assert quality.max_relative_error == pytest.approx(0, abs=1e-9)
    assert quality.r2 < 0.5  # of all measurements, the disturbed one included


def test_small_sizes_count_as_much_as_large_ones():
    """Ordinary least squares gives the small sizes away here, with an R2 that looks perfect."""
    random = np.random.default_rng(0)
    times = (0.05 + 1e-6 * np.array(SIZES)) * (1 + random.normal(0, 0.02, len(SIZES)))
    cost, quality = fit_linear(SIZES, times)
    slope, intercept = np.polyfit(SIZES, times, 1)
    ordinary = np.abs((intercept + slope * np.array(SIZES)) / times - 1).max()
    assert np.corrcoef(SIZES, times)[0, 1] ** 2 > 0.999
    assert ordinary > 0.4
    assert quality.max_relative_error < 0.06
    assert cost.alpha_ms == pytest.approx(0.05, rel=0.03)


@given(st.lists(st.floats(1e-3, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
def test_never_a_negative_term(times):
    times[-1] = times[0] + 1e-3  # else it might be refused
    cost, _ = fit_linear(SIZES, times)
    assert cost.alpha_ms >= 0
    assert cost.beta > 0


def test_a_curve_is_not_trusted_though_its_r2_is_high():
    sizes = np.array(SIZES, dtype=float)
    _, quality = fit_linear(SIZES, 1e-6 * sizes + 0.00014 * sizes**0.5)
    assert quality.r2 > 0.98
    assert quality.max_relative_error > 0.15
    assert "misses a measured time by" in quality.distrust()
    assert "variance" in FitQuality(r2=0.5).distrust()
    cost = LinearCost(0.1, 1e-6)
    profile = Profile(cost, cost, cost, cost, cost, {"a2a": quality, "gemm": FitQuality(0.99)})
    assert [text.split(":")[0] for text in profile.distrust()] == ["a2a"]


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([1, 2, 3], [5.0, 5.0, 5.0], "do not grow from 1 to 3 units"),
        ([1, 1], [1.0, 2.0], "1 distinct sizes"),
        ([], [], "0 distinct sizes"),
        ([1, 2], [1.0, -1.0], "measurement 1: time is -1.0"),
        ([0, 2], [1.0, 1.0], "measurement 0: size is 0.0"),
        ([1, 2], [1.0, float("nan")], "measurement 1: time is nan"),
        ([1, 2], [1.0], "2 sizes and 1 times"),
    ],
)
def test_what_cannot_be_fitted(sizes, times, message):
    with pytest.raises(ProfileError, match=message):
        fit_linear(sizes, times)


def test_costs():
    cost = LinearCost(0.5, 2.0)
    assert (cost.time_ms(0), cost.time_ms(3)) == (0, 6.5)
    assert (cost.units_within(0.4), cost.units_within(0.5), cost.units_within(6.5)) == (0, 0, 3)
    assert LinearCost(0.5, 0).units_within(1) == float("inf")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProfileError, match="must be a finite number"):
            LinearCost(wrong, 1.0)
        with pytest.raises(ProfileError, match="beta is"):
            LinearCost(1.0, wrong)
