"""Profiles are the same on every rank, kept, and used again where they fit."""

import json

import pytest

from tests.support.gloo_ranks import run

PROBE = "tests.support.profiler_probe"
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("nodes", "operations"),
    [
        ([0, 0, 1, 1], {"a2a", "allreduce", "allgather", "reducescatter", "gemm"}),
        ([0, 1], {"a2a", "allreduce", "gemm"}),
    ],
)
def test_profiles_are_measured_once_and_kept(tmp_path, nodes, operations):
    folder = tmp_path / "profiles"
    first, *others = run(f"{PROBE}:profile", len(nodes), tmp_path, nodes=nodes, kept=str(folder))
    assert all(other == first for other in others)
    assert set(first["samples"]) == operations
    for points in first["samples"].values():
        units = [unit for unit, _ in points]
        assert len(points) >= 3
        assert units == sorted(set(units))
        assert all(ms > 0 for _, ms in points)
    assert first["same"]
    assert first["known"]
    assert first["unknown"] == "nan"
    # Measured; reused; damaged and so measured; another expert; measured because it was asked.
    assert first["reused"] == [False, True, False, False, False]
    assert first["files"] == 2
    told = json.loads(first["text"])
    assert told["samples"] == first["samples"]
    for operation in first["operations"]:
        slope = "beta_ms_per_flop" if operation == "gemm" else "beta_ms_per_byte"
        assert set(told[operation]) == {"alpha_ms", slope}


def test_sizes_that_take_too_long_are_left_out_by_all(tmp_path):
    for told in run(f"{PROBE}:slow_sizes", 2, tmp_path):
        assert told["made"] == [1, 2, 3]
        assert told["sizes"] == [1, 2, 3]
        # The slower of the two ranks counts.
        assert told["samples"]["op"][2][1] >= 60


def test_drift_is_decided_by_all_ranks_together(tmp_path):
    first, second = run(f"{PROBE}:drift", 2, tmp_path)
    assert first == second
    assert first["none"] == first["one waits"] == first["too few"] == {}
    assert first["slow link"] == {"a2a": pytest.approx(2.0)}
    assert first["fast link"] == {"a2a": pytest.approx(0.5)}
    assert first["one computes slowly"] == {"gemm": pytest.approx(1.5)}
