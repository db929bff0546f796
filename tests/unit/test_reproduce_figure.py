"""Figures of the papers: what a row must say, and the page that is made of them."""

import pytest

from tools.reproduce import book, figure
from tools.reproduce.figure import ROOT, Compared, Figure

PAGE = ROOT / "docs" / "figures.md"


def test_a_difference_of_more_than_a_tenth_needs_a_reason():
    with pytest.raises(ValueError, match=r"speed: 2 here, 1\.0 in the paper: say why they differ"):
        Compared("speed", 1.0, 2.0, "computed")
    assert Compared("speed", 1.0, 2.0, "computed", "another machine").difference == 1.0
    assert Compared("speed", 1.0, 1.05, "computed").difference == pytest.approx(0.05)
    assert Compared("speed", None, 2.0, "computed").difference is None
    assert Compared("share", 0.0, 0.1, "computed").difference is None
    with pytest.raises(AssertionError):
        Compared("speed", None, 2.0, "guessed")


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345, "0.0123"), (2.0, "2"), (45.26, "45.3"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits(value, text):
    assert figure.number(value) == text


def test_what_is_published_is_on_the_page(tmp_path, capsys, monkeypatch):
    (tmp_path / "one.png").write_bytes(b"")
    rows = (
        Compared("time in s", 2.0, 3.0, "simulated", "no trace is public"),
        Compared("share", None, 0.5, "measured"),
    )
    one = Figure("lazarus_one", "Table 9", "Nine.", rows, ("A note.",), ("one.png",))
    figure.publish(tmp_path, one)
    assert Figure.read(tmp_path / "lazarus_one.json") == one
    out = capsys.readouterr().out
    assert "no trace is public" in out
    assert "+50.0%" in out
    monkeypatch.setattr(book, "programs", lambda: {"lazarus": ["lazarus_one"], "moc": []})
    text = book.page(tmp_path)
    assert "| time in s | 2 | 3 | +50.0% | simulated |" in text
    assert "| share | - | 0.5 | - | measured |" in text
    assert "- no trace is public\n- A note.\n" in text
    assert "![Table 9](figures/one.png)" in text


def test_the_page_has_every_program_and_its_pictures():
    text = PAGE.read_text(encoding="utf-8")
    for names in book.programs().values():
        for name in names:
            assert f"`.venv/bin/python tools/reproduce/{name}.py`" in text, name
    pictures = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    assert pictures == {part.split(")")[0] for part in text.split("](figures/")[1:]}


def test_what_the_readme_says_of_figures_stands_on_their_page():
    page = PAGE.read_text(encoding="utf-8").splitlines()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Figures of papers")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.endswith(("computed |", "simulated |"))]
    assert len(rows) == 8
    assert not set(rows) - set(page)
    assert f"has {sum(map(len, book.programs().values()))} figures" in section


@pytest.mark.parametrize("wrong", [("--draws", "0"), ("--draws", "x"), ("--out", __file__)])
def test_flags_that_no_figure_can_be_made_with(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        figure.flags("A figure.", draws=2).parse_args(wrong)
    assert stopped.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def test_a_page_takes_away_old_pictures_and_nothing_else(tmp_path, capsys, monkeypatch):
    """And nothing at all before every figure is there."""
    names = ["lazarus_one", "lazarus_two"]
    monkeypatch.setattr(book, "programs", lambda: {"lazarus": names})
    monkeypatch.setattr(book, "measures", lambda name: False)
    made = []

    def make(name, out):
        made.append(name)
        (out / f"{name}.png").write_bytes(b"")
        one = Figure(name, "Table 9", "Nine.", (), (), (f"{name}.png",))
        figure.publish(out, one)
        return True

    monkeypatch.setattr(book, "make", make)
    pictures = tmp_path / "docs" / "figures"
    pictures.mkdir(parents=True)
    for name in ("old.png", "notes.txt"):
        (pictures / name).touch()
    flags = ("--out", str(tmp_path / "out"), "--docs", str(tmp_path / "docs"))
    monkeypatch.setattr("sys.argv", ["book.py", *flags, "lazarus_one", "lazarus_one"])
    assert book.main() == 0
    assert made == ["lazarus_one"]
    assert "has nothing yet of lazarus_two" in capsys.readouterr().out
    assert {path.name for path in pictures.iterdir()} == {"old.png", "notes.txt"}
    monkeypatch.setattr("sys.argv", ["book.py", *flags, "lazarus_two"])
    assert book.main() == 0
    kept = {path.name for path in pictures.iterdir()}
    assert kept == {"lazarus_one.png", "lazarus_two.png", "notes.txt"}
