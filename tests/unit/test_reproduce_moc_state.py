"""The figures of MoC-System about bytes and time: they run, and facts that must hold."""

import pytest

from tests.support.figures import made
from tools.reproduce import moc_bottleneck, moc_scaling, moc_sharding, moc_sizes, moc_stall
from tools.reproduce.moc_setup import CASES, GPT_125M, GPT_350M


def test_models_have_the_parameters_that_the_paper_says():
    for model, count in ((GPT_125M, 323e6), (GPT_350M, 1.7 * 2**30)):
        parameters = model.dense_parameters + model.expert_parameters
        assert parameters == pytest.approx(count, rel=0.03)
        kinds = model.wanted(model.select(0, model.experts), "selected")
        assert model.total_bytes(kinds) == 14 * parameters  # Eq. 5


def test_a_partial_save_is_that_of_eq_6_or_of_the_published_sizes():
    own = GPT_350M
    share = own.expert_parameters / (own.expert_parameters + own.dense_parameters)
    for k in (1, 2, 8, 16):
        size = moc_sizes.relative_size(own, k, "WO", "selected")
        assert size == pytest.approx(1 - share * (1 - k / 16))
        masters = moc_sizes.relative_size(own, k, "WO", "all")
        assert masters == pytest.approx(1 - share * (1 - k / 16) * 10 / 14)
    for part, paper in moc_sizes.PAPER.items():
        assert moc_sizes.relative_size(own, 1, part, "all") == pytest.approx(paper, abs=0.006)


def test_sizes(tmp_path, monkeypatch):
    figure, rows = made(moc_sizes, tmp_path, monkeypatch)
    assert len(rows) == 3 * 2 * (4 + 5)
    assert {row.how for row in figure.rows} == {"computed"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_every_way_writes_all_bytes_and_ours_has_the_least_bottleneck(case, k):
    kinds = GPT_350M.wanted(GPT_350M.select(1, k), "all")
    found = {
        way: moc_sharding.rank_bytes(way, case, GPT_350M, k, 1, "all") for way in moc_sharding.WAYS
    }
    for loads in found.values():
        assert sum(loads) == pytest.approx(GPT_350M.total_bytes(kinds))
    most = {way: max(loads) for way, loads in found.items()}
    assert most["ours"] <= 1.01 * min(most.values())
    assert most["EE"] <= most["baseline"]
    assert most["EE+AN"] <= most["EE+EN"]


def test_the_baseline_is_what_the_paper_describes():
    case, model = CASES[2], GPT_350M
    loads = moc_sharding.rank_bytes("baseline", case, model, model.experts)
    optimizer = 12 * (model.dense_parameters + model.expert_parameters) / case.ranks
    experts = 2 * model.expert_parameters / case.group
    assert loads[0] == pytest.approx(optimizer + experts + 2 * model.dense_parameters)
    assert loads[7] == pytest.approx(optimizer + experts)
    assert loads[8] == pytest.approx(optimizer)


def test_bottleneck(tmp_path, monkeypatch):
    figure, rows = made(moc_bottleneck, tmp_path, monkeypatch)
    assert len(rows) == 3 * 5 * 5
    assert sum("ours" in row.what for row in figure.rows) == 5


def test_what_the_paper_says_of_iterations_fits_together():
    # Three numbers of case 1 give the fourth.
    blocking = moc_stall.blocking_share(5.12, 0.982)
    assert (1 + blocking) / (1 + blocking * 0.018) == pytest.approx(5.12)
    assert moc_stall.below(0.863, 0.982, blocking) == pytest.approx(0.332, abs=0.002)


def test_stalls_are_not_measured_if_told_so(tmp_path, monkeypatch):
    figure, rows = made(moc_stall, tmp_path, monkeypatch, "--no-measure")
    assert "measured" not in {row.how for row in figure.rows}
    assert {row["what"] for row in rows} == {"snapshot"}


def test_stalls_that_were_measured_are_ratios(tmp_path, monkeypatch):
    found = {
        "Megatron, sync": (0.2, 0.2),
        "Megatron, async": (0.1, 0.5),
        "ours, exact": (0.002, 0.4),
        "ours, K=1": (0.001, 0.2),
    }
    monkeypatch.setattr(moc_stall, "measured", lambda: found)
    figure, rows = made(moc_stall, tmp_path, monkeypatch)
    ours = [row.ours for row in figure.rows if row.how == "measured"]
    assert ours == pytest.approx([0.99, 0.995, 0.5, 0.4])
    assert sum(row["case"] == "measured" for row in rows) == 8


def test_scaling(tmp_path, monkeypatch):
    _, rows = made(moc_scaling, tmp_path, monkeypatch)
    assert len(rows) == 2 * 4 * len(moc_scaling.GPUS)
    # Calibrated to hide a full save on 1024 GPUs exactly.
    full = moc_scaling.base_bytes(1024) / moc_scaling.A800.bytes_per_second
    assert moc_scaling.f_and_b(moc_scaling.A800, 1024) == pytest.approx(full)
    assert moc_scaling.in_turn(64) == moc_scaling.in_turn(512) == 3
    assert (moc_scaling.neighbours(64), moc_scaling.neighbours(512)) == (8, 24)
    assert moc_scaling.moc_bytes(64, 3) == pytest.approx(
        moc_scaling.DENSE * 14 / 64 + 3 * moc_scaling.EXPERT * 14
    )
    assert moc_scaling.most_experts([(0, 1), (1, 2)]) == 2
