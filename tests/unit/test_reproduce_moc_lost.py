"""The figures of MoC-System about lost tokens and intervals: they run, and facts that must hold."""

import pytest

from megatron_resilient.algorithms.lost_tokens import DynamicK, expected_share
from tests.support.figures import made
from tools.reproduce import moc_dynamic_k, moc_interval, moc_plt, moc_quality
from tools.reproduce.moc_faults import Setting, even, play


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_even_loads_lose_what_eq_7_says(k):
    found = play(Setting(even(6, 8)), [640], DynamicK(8, k))
    assert found == [(640, pytest.approx(expected_share(32, 8, k, 1280)), k)]


def test_the_paper_s_threshold_is_that_of_1280_steps():
    assert moc_plt.total_steps() == 1280
    assert expected_share(32, 8, 2, 1280) == pytest.approx(0.0375)


def test_two_faults_behind_one_save_lose_once():
    first, second = play(Setting(even(2, 4), tokens=1024), [640, 650], DynamicK(4, 1))
    assert first[1] > 0
    assert second[1] == 0


def test_experts_of_healthy_nodes_come_from_memory():
    from_storage = play(Setting(even(2, 4)), [640], DynamicK(4, 1))[0][1]
    with_memory = Setting(even(2, 4), k_snapshot=4, nodes=2)
    # All experts are in the snapshot: only those of the lost node, which are two of four, are old.
    lost = play(with_memory, [640], DynamicK(4, 1))[0][1]
    assert 0 < lost < from_storage


def test_plt(tmp_path, monkeypatch):
    figure, rows = made(moc_plt, tmp_path, monkeypatch, "--draws", "2")
    assert figure.rows[0].how == "calibrated"
    assert {row["over"] for row in rows} == {"K", "interval", "faults"}
    closed = {
        row["value"]: float(row["plt"])
        for row in rows
        if (row["over"], row["way"]) == ("K", "closed form")
    }
    for row in rows:
        if (row["over"], row["way"]) == ("K", "even, in turn"):
            assert float(row["plt"]) == pytest.approx(closed[row["value"]], rel=0.02)


def test_dynamic_k(tmp_path, monkeypatch):
    _, rows = made(moc_dynamic_k, tmp_path, monkeypatch, "--draws", "1")
    last = {row["way"]: row for row in rows}
    assert float(last["ours"]["plt"]) <= moc_dynamic_k.LIMIT
    assert float(last["K = 1"]["plt"]) > moc_dynamic_k.LIMIT
    assert last["K = 1"]["k"] == "1"


def test_the_paper_s_rule_doubles_k_above_its_limit():
    own = moc_dynamic_k.Printed(8, 1, 0.04)
    assert own.on_fault(0.02, 1, 1, 9) == 1
    assert own.on_fault(0.001, 1, 1, 9) == 2
    assert own.on_fault(0.009, 1, 1, 9) == 2
    assert own.on_fault(0.002, 1, 1, 9) == 4
    assert own.lost == pytest.approx(0.032)


def test_interval(tmp_path, monkeypatch):
    figure, rows = made(moc_interval, tmp_path, monkeypatch, "--draws", "2")
    assert len(rows) == 2 * (len(moc_interval.STEPS_BETWEEN_FAULTS) + len(moc_interval.FACTORS))
    assert all(row.ours > 1 for row in figure.rows if "full / MoC" in row.what)


def test_quality_is_read_from_the_page(tmp_path, monkeypatch):
    figure, rows = made(moc_quality, tmp_path, monkeypatch)
    assert len(rows) == 6
    full = next(row for row in rows if row["saves"] == "full")
    assert float(full["lost_tokens"]) == float(full["end"]) == 0
    assert len(figure.rows) == 2 * 5


@pytest.mark.parametrize(
    "text",
    [
        "no table",
        f"{moc_quality.HEADING}\n\nno table here\n",
        f"{moc_quality.HEADING}\n| | lost tokens | a | b |\n|---|\n| K = 1 | much | 0 | 0 |\n",
        f"{moc_quality.HEADING}\n| | lost tokens | a | b |\n|---|\n| K = 1 | 2 % | +0.1 | 0 |\n",
    ],
)
def test_a_page_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"lost tokens|another form|deviation"):
        moc_quality.read_table(text)
