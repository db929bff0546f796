"""Figures of FSMoE that play settings through: fits, table 2, speed-ups, degrees."""

import numpy as np
import pytest

from megatron_resilient.algorithms.four_cases import four_case_time
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import ORDERS
from megatron_resilient.simulation.overlap import (
    OURS,
    READINGS,
    TESTBED_A,
    TESTBED_B,
    Reading,
    unit_costs,
)
from tests.support import figures
from tools.reproduce import (
    fsmoe_breakdown,
    fsmoe_degrees,
    fsmoe_fits,
    fsmoe_settings,
    fsmoe_slsqp,
)
from tools.reproduce.fsmoe_setup import GPT2_XL, MIXTRAL_7B


def made(module, tmp_path, monkeypatch, *flags):
    figure, rows = figures.made(module, tmp_path, monkeypatch, *flags)
    return figures.by_what(figure), rows


def test_the_printed_reading_of_each_testbed_is_there():
    assert [(t, r) for t, r in READINGS if r == Reading()] == [
        (TESTBED_A, Reading()),
        (TESTBED_B, Reading()),
    ]
    assert len({(t.name, r.name) for t, r in READINGS}) == len(READINGS)


def test_speedups_of_some_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(fsmoe_settings, "EVERY", 29)
    table, rows = made(fsmoe_settings, tmp_path, monkeypatch)
    assert len(rows) == len(READINGS) * len(fsmoe_settings.NAMES)
    assert table["B, as printed: FSMoE"].paper == 1.22
    assert table["A, as printed: Tutel-Improved"].paper == 1.09
    assert {row.how for row in table.values()} == {"simulated"}
    for testbed, reading in READINGS:
        means = fsmoe_settings.mean_speedups(testbed, reading)
        names = fsmoe_settings.NAMES
        assert means[names[OURS]] >= means["FSMoE"] - 1e-9 > means["FSMoE-No-IIO"] - 1e-9 > 1


def test_table_2_tells_which_costs_are_in_doubt(tmp_path, monkeypatch):
    table, _ = made(fsmoe_breakdown, tmp_path, monkeypatch)
    # Sizes of the AllReduce fit to the digit, all-to-alls to an eighth.
    for shape in (GPT2_XL, MIXTRAL_7B):
        assert table[f"A, {shape.name}: AllReduce, ms"].difference == pytest.approx(0, abs=0.002)
        for testbed in "AB":
            assert abs(table[f"{testbed}, {shape.name}: all-to-alls, ms"].difference) < 0.13
        for kind in ("AllGathers", "ReduceScatters"):
            assert table[f"B, {shape.name}: {kind}, ms"].difference < -0.7
            mended = table[f"B, {shape.name}: {kind}, ms, betas per byte"]
            assert abs(mended.difference) < 0.07
        assert table[f"A, {shape.name}: AllGathers, ms"].difference > 9


def test_part_and_per_byte_is_whole_and_per_element_with_four_ranks():
    assert TESTBED_B.ranks_per_node == 4
    per_byte = unit_costs(TESTBED_B, Reading(per_byte=True))
    per_element = unit_costs(TESTBED_B, Reading())
    assert per_byte["a2a"].time_ms(1e6) == pytest.approx(per_element["a2a"].time_ms(4e6))
    assert per_byte["gemm"] == per_element["gemm"]


def test_fits_recover_what_was_drawn(tmp_path, monkeypatch):
    names = list(fsmoe_fits.R2)
    told = {
        "samples": {name: [(1e6, 1.0), (2e6, 2.0)] for name in names},
        "lines": {name: {"alpha_ms": 0.1, "beta": 1e-6} for name in names},
        "quality": {name: {"r2": 0.99} for name in names},
        "measuring_seconds": 2.0,
        "fitting_seconds": 0.001,
    }
    layouts = []

    def run(target, ranks, folder, timeout_seconds, nodes, **options):
        assert target == "tools.reproduce.fsmoe_ranks:profile"
        assert timeout_seconds <= 60
        layouts.append(nodes)
        return [told] * ranks

    monkeypatch.setattr(fsmoe_fits.gloo_ranks, "run", run)
    table, rows = made(fsmoe_fits, tmp_path, monkeypatch, "--draws", "3")
    assert layouts == [(0, 1), (0, 0)]
    assert table["measuring, s (paper: < 100)"].ours == 4.0
    assert len(rows) == 3 * 10 + 5
    for row in table.values():
        if row.how == "simulated" and row.paper is not None:
            assert abs(row.difference) < 0.05, row.what
    assert table["R2, gemm"].how == "measured"
    disturbed = [row.ours for what, row in table.items() if what.startswith("one run in ten")]
    assert disturbed[0] < 0.1 * disturbed[1]  # ours, least squares


def test_degrees_of_some_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(fsmoe_degrees, "EVERY", 29)
    monkeypatch.setattr(fsmoe_degrees, "SEARCHED", 6)
    table, _ = made(fsmoe_degrees, tmp_path, monkeypatch, "--draws", "100")
    # Not all settings: nothing to compare with 912.
    assert table["B, as printed: degrees of both passes differ"].paper is None
    assert table["B: the same, most"].ours >= 0
    gains = [row.ours for what, row in table.items() if "gain by the best order" in what]
    assert min(gains) >= -1e-9
    assert max(gains) > 0.05


def test_real_degrees_are_minima_of_the_formulas():
    """The search of Algorithm 1 is right where one formula holds everywhere."""
    # Experts dominate: 2 A + G + S + r X, with its minimum at sqrt((2 a + g + s) / x).
    costs = StageCosts((0.01, 0.01, 0.1, 0.01, 0.01), (1.0, 1.0, 60.0, 1.0, 1.0))
    assert fsmoe_slsqp.slsqp_degree(costs) == pytest.approx(np.sqrt(4.0 / 0.1), rel=0.01)
    # Links inside nodes dominate: 2 A + r (G + S), with its minimum at sqrt(2 a / (g + s)).
    costs = StageCosts((0.01, 0.05, 0.01, 0.05, 0.01), (1.0, 30.0, 1.0, 30.0, 1.0))
    assert fsmoe_slsqp.slsqp_degree(costs) == pytest.approx(np.sqrt(2.0 / 0.1), rel=0.01)


def test_searched_degrees_are_at_most_a_little_worse_than_all_integers():
    passes = fsmoe_degrees.flat(fsmoe_degrees.drawn(5, seed=3))
    for own, options in zip(passes, phase_options(passes, 16, orders=ORDERS[:1]), strict=True):
        times = options.choose().by_degree_ms
        found = times[round(fsmoe_slsqp.slsqp_degree(own)) - 1]
        assert min(times) <= found <= 1.2 * min(times)
        a2a, gather, expert, scatter, _ = (
            alpha + whole / 4 for alpha, whole in zip(own.alpha_ms, own.whole_ms, strict=True)
        )
        told = four_case_time(a2a, gather, scatter, expert, 4)[1]
        assert fsmoe_degrees.formula_times(own)[3] == told


def test_how_many_differ():
    assert fsmoe_degrees.differing([1, 2, 3, 1, 4, 3]) == 1
