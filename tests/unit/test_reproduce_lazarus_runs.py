"""Figures of Lazarus that are long simulated runs: Tutel, and DeepSeek-V3 on many nodes."""

import pytest

from tests.support import figures
from tools.reproduce import lazarus_simulation, lazarus_tutel
from tools.reproduce.lazarus_failures import failing


def made(module, tmp_path, monkeypatch):
    figure, rows = figures.made(module, tmp_path, monkeypatch, "--draws", "1")
    return figure.rows, rows


def test_beside_tutel(tmp_path, monkeypatch):
    rows, steps = made(lazarus_tutel, tmp_path, monkeypatch)
    assert [row.paper for row in rows] == [2.1, 1.8, 1.4, 4.0, 3.9, 2.6]
    for model in ("GPT-S", "GPT-L"):
        kept = [int(row["steps"]) for row in steps if row["model"] == model]
        assert kept == sorted(kept)  # Tutel, checkpoints, groups, ours
    assert failing(5, 0, 16).sizes()[-1] == (8 * 300.0, 8)


def test_a_large_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(lazarus_simulation, "HOURS", 2.0)
    paper = {(256, 0.05): {"DS(FT)": 2.9, "DS": 4.5}}
    monkeypatch.setattr(lazarus_simulation, "PAPER", paper)
    rows, systems = made(lazarus_simulation, tmp_path, monkeypatch)
    assert [(row.paper, row.how) for row in rows] == [(2.9, "simulated"), (4.5, "calibrated")]
    assert all(row.ours > 1 for row in rows)
    assert [row["system"] for row in systems] == ["DS", "DS(FT)", "ours"]
    assert [int(row["rollbacks"]) for row in systems][1:] == [0, 0]


def test_the_model_is_deepseek_v3():
    work = lazarus_simulation.workload(64, 0)
    assert work.full_bytes == pytest.approx(671e9 * 14)
    assert work.slots_per_node * work.nodes == 2048
    assert work.dense_bytes / 14 == pytest.approx(17e9, rel=0.05)
