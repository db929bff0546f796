"""The figures of Lazarus that are simulated: they run, and say what is whose."""

import csv

import pytest

from megatron_resilient.simulation.failures import draw_failures
from tests.support import figures
from tools.reproduce import lazarus_failures, lazarus_setup, lazarus_spot, spot_segment
from tools.reproduce.figure import Figure


def made(module, tmp_path, monkeypatch, capsys, *flags):
    figures.made(module, tmp_path, monkeypatch, "--draws", "1", *flags)
    return capsys.readouterr().out


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_failures_one_by_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lazarus_failures, "POINTS", 6)
    text = made(lazarus_failures, tmp_path, monkeypatch, capsys)
    assert "paper" in text
    assert "difference" in text
    assert text.count("simulated") == 7
    assert text.count("calibrated") == 2
    assert "measured" not in text
    rows = rows_of(tmp_path / "lazarus_failures.csv")
    assert len(rows) == 4 * 3 * 6
    samples = [float(row["samples"]) for row in rows if row["system"] == "ours"][:6]
    assert samples == sorted(samples)  # it never goes back
    assert (tmp_path / "lazarus_failures.png").read_bytes().startswith(b"\x89PNG")


def test_a_spot_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lazarus_spot, "POINTS", 4)
    path = tmp_path / "trace.csv"
    start = "".join(f"0,add,node{i}\n" for i in range(1, 13))
    lost = "".join(f"{34 * 60_000},remove,node{i}\n" for i in (3, 5, 7, 11))
    path.write_text(f"{start}{lost}{43 * 60_000},add,node13\n{80 * 60_000},add,node14\n")
    made(lazarus_spot, tmp_path, monkeypatch, capsys, "--trace", str(path))
    assert [row.paper for row in Figure.read(tmp_path / "lazarus_spot.json").rows] == [
        *(2.3, 1.2, None, 1.0),
        *(3.4, 1.8, None, 1.0),
    ]
    assert len(rows_of(tmp_path / "lazarus_spot.csv")) == 2 * 3 * 4
    assert (tmp_path / "lazarus_spot.png").read_bytes().startswith(b"\x89PNG")
    trace = spot_segment.ten_of(spot_segment.read_trace(path), 0)
    assert trace.sizes() == [(0.0, 10), (34 * 60.0, 6), (43 * 60.0, 7)]


def test_no_spot_trace_is_compared_with_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lazarus_spot, "POINTS", 2)
    monkeypatch.setattr(spot_segment, "default_trace", lambda: None)
    made(lazarus_spot, tmp_path, monkeypatch, capsys)
    figure = Figure.read(tmp_path / "lazarus_spot.json")
    assert "drawn failures: no trace was given" in figure.text
    assert {row.paper for row in figure.rows} == {None}


def test_ten_places_are_never_more():
    for seed in range(5):
        trace = draw_failures(16, 60.0, 4000.0, seed=seed, repair_seconds=300.0)
        sizes = [number for _, number in spot_segment.ten_of(trace, seed).sizes()]
        assert max(sizes) == 10


def test_what_is_fitted_fits():
    own = lazarus_setup.workload(lazarus_setup.GPT_M, 3)
    costs = lazarus_setup.costs(lazarus_setup.GPT_M, 3)
    ours, theirs = (
        lazarus_setup.Policy(lazarus_setup.parse_system(name), own, costs).step_seconds(10)
        for name in ("ours", "groups")
    )
    assert 40 / ours == pytest.approx(45)
    assert theirs / ours <= 45 / 34 + 1e-9
    assert lazarus_setup.GPT_S.expert_bytes == pytest.approx(63 * 2**20, rel=0.01)
    assert lazarus_setup.GPT_L.expert_bytes == pytest.approx(112 * 2**20, rel=0.01)
