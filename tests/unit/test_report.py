"""The page, and the command that makes it."""

import importlib.util
import json
import math
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_resilient import cli
from megatron_resilient.report.page import build_page
from megatron_resilient.report.run import Run
from megatron_resilient.telemetry import EventLog, RunSummary, read_events
from tests.support.synthetic_run import write_synthetic_run

VOID = {"meta", "link", "br", "img", "hr", "input", "base"}
SECTIONS = [
    "loss",
    "throughput",
    "expert-load",
    "placement",
    "schedule",
    "members",
    "recoveries",
    "checkpoints",
    "errors",
    "timeline",
]


class Page(HTMLParser):
    """Reads a page; raises if tags do not match or an id stands twice."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.ids = [], [], [], []
        self.pieces = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.pieces.append(data)

    @property
    def words(self):
        return " ".join(self.pieces)

    def values(self, name):
        return [value for _, of, value in self.attributes if of == name]


def page_of(run_dir, name="run"):
    return build_page(Run.of(name, read_events(run_dir)))


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("synthetic")
    write_synthetic_run(run_dir, steps=900, layers=14, experts=16, nodes=6)
    return run_dir


@pytest.fixture(scope="module")
def text(synthetic):
    return page_of(synthetic)


@pytest.fixture
def only_this_command(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", ("report",))


def test_the_page_has_all_sections_and_is_well_formed(text):
    page = Page(text)
    assert [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")] == (
        SECTIONS
    )
    assert page.tags.count("svg") == 12
    assert text.startswith("<!DOCTYPE html>")
    assert "Not in this report" not in page.words


def test_the_page_needs_nothing_from_elsewhere(text):
    page = Page(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
        for value in page.values(name):
            assert value.startswith(("#", "data:image/png;base64,"))


def test_references_inside_the_page_lead_somewhere(text):
    page = Page(text)
    ids = set(page.ids)
    targets = [value[1:] for value in page.values("href") if value.startswith("#")]
    targets += [value[5:-1] for value in page.values("clip-path")]
    targets += page.values("aria-labelledby")
    assert len(targets) > 50
    assert set(targets) <= ids


def test_every_picture_says_what_it_shows(text):
    page = Page(text)
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg")
    assert len(set(labels)) == len(labels)
    assert labels[0].startswith("Loss over training steps. 2.")


def test_colours_are_those_of_the_page(text):
    assert "#01fe" not in text
    css, body = text.split("</style>")
    used = {part.split(")")[0] for part in body.split("var(--")[1:]}
    assert {"blue", "red", "teal", "muted", "grid", "ink"} <= used
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    for name in used:
        assert f"--{name}: #" in light
        assert f"--{name}: #" in dark


def test_the_same_events_give_the_same_page(synthetic, text):
    assert page_of(synthetic) == text


def test_facts_and_figures(synthetic, text):
    words = " ".join(Page(text).words.split())
    summary = RunSummary.from_events(read_events(synthetic))
    assert summary.lost_steps == 44
    for expected in (
        "Steps done 900 44 more rolled back",
        "Ranks 48, TP 1, PP 2, EP 32, DP 24",
        "Model 14 layers, 16 experts a layer",
        "Device NVIDIA H200",
        "torch 2.11.0",
        "in 2 jobs",
        "Completed",
        f"Recoveries {len(summary.recoveries)} median",
        "experts of 12 of the 14 layers",
        "No space left on device: 'runs/<script>alert(1)</script>'",
        "runs/moe/step-0000900",
        "no end written",
    ):
        assert expected in words


EVIL = "<script>alert('x')</script>&amp;\"'</style></svg><b onclick=\"x\">$\\frac{1}{2}$"


def evil_run(run_dir, evil):
    with EventLog(run_dir, rank=0, node=evil) as log:
        log.emit("member_join", member=evil)
        log.emit("member_join", member="n" + evil)
        log.emit(
            "run_start",
            world_size=1,
            device=evil,
            patch_digest=evil,
            versions={evil: evil},
            args={evil: [evil]},
        )
        for step in range(1, 4):
            log.emit("step", step, loss={evil: 1.0 + step}, seconds=1.0, tokens=1)
        log.emit("failure", 3, cause=evil, failed_nodes=[evil])
        log.emit("recovery", 3, seconds={evil: 1.0}, source=evil)
        log.emit("checkpoint_saved", 3, path=evil, seconds=1.0, stall_seconds=1.0)
        log.emit("evaluation", 3, loss={evil: 2.0}, split=evil)
        log.emit("error", message=evil, type=evil, **{"field " + evil: evil})
        log.emit("run_end", exit=evil)
    with log.path.open("a") as file:
        common = {"time": 9e9, "step": None, "generation": 0, "rank": None}
        file.write(json.dumps({"event": evil or "later", **common}) + "\n")


def test_what_events_say_is_text_and_nothing_else(tmp_path, text):
    evil_run(tmp_path, EVIL)
    page = Page(page_of(tmp_path, name=EVIL))
    # No tag and no attribute that a harmless run has not; the list is of the missing sections.
    assert set(page.tags) <= set(Page(text).tags) | {"ul", "li"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.words.count(EVIL) >= 15


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(evil=st.text(max_size=40))
def test_any_text_makes_a_page(tmp_path_factory, evil):
    run_dir = tmp_path_factory.mktemp("any")
    evil_run(run_dir, evil)
    text = page_of(run_dir, name=evil)
    text.encode("utf-8")
    page = Page(text)
    assert "\x00" not in text
    assert "b" not in page.tags


def test_letters_that_no_font_has_are_no_warning(tmp_path):
    evil_run(tmp_path, "\ud800\x00\N{CJK UNIFIED IDEOGRAPH-4E16}\N{PILE OF POO}\n")
    page_of(tmp_path).encode("utf-8")


def test_sections_without_data_are_named(tmp_path):
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", world_size=1)
    page = Page(page_of(tmp_path))
    sections = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert sections == ["timeline"]
    missing = page.words.split("Not in this report, since the run recorded nothing of it:")[1]
    lines = [line.strip() for line in missing.splitlines() if line.strip()]
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "Loss",
        "Throughput",
        "Expert load",
        "Placement",
        "Schedule",
        "Members",
        "Recoveries",
        "Checkpoints",
        "Errors",
    ]
    assert "from 1 event." in lines[-1]
    assert "running or killed" in page.words


def test_a_run_of_steps_only(tmp_path):
    with EventLog(tmp_path, rank=0) as log:
        log.emit("step", 1, loss={}, seconds=1.0, tokens=1)
    page = Page(page_of(tmp_path))
    assert "Loss: no finished step names one." in page.words
    assert "Timeline: nothing but steps." in page.words


def test_a_run_in_which_nothing_is_as_it_should_be(tmp_path):
    nan = math.nan
    with EventLog(tmp_path, rank=0, clock=lambda: 5.0) as log:
        log.emit("step", 3, loss={"lm loss": 1.0}, seconds=1e-320, tokens=7)
        log.emit("step", 4, loss={"lm loss": nan}, seconds=0.0, tokens=0)
        log.emit("recovery", 4, seconds={})
        log.emit("recovery", None, seconds={"detect": nan})
        log.emit("checkpoint_saved", None, path="x", seconds=0.0, stall_seconds=0.0)
        log.emit("expert_load", 4, layer=1, tokens=[0, 0], steps=1)
        log.emit("expert_load", None, layer=1, tokens=[0, 1], steps=1)
        log.emit("evaluation", None, loss={})
        log.emit("run_end", exit="out of memory")
    page = Page(page_of(tmp_path))
    assert "Expert load: no expert had a token." in page.words
    assert "Ended: out of memory" in page.words


def test_many_of_everything(tmp_path):
    with EventLog(tmp_path, rank=0) as log:
        for index in range(60):
            log.emit("member_join", member=f"node-{index}", members=index + 1)
        for index in range(700):
            log.emit("failure", index)
            log.emit("recovery", index, seconds={"detect": 1.0 + index})
            log.emit("checkpoint_saved", index, path=f"c/{index}", seconds=1.0, stall_seconds=0.5)
    page = Page(page_of(tmp_path))
    assert "The 24 slowest are drawn." in page.words
    assert "Earlier ones, 200, are left out." in page.words
    assert "c/699" in page.words
    assert "c/199" not in page.words
    assert "Up to 60 nodes" in page.words


def test_the_command_writes_the_page(synthetic, tmp_path, capsys, only_this_command):
    output = tmp_path / "page.html"
    assert cli.main(["report", str(synthetic), "--output", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    assert Page(output.read_text(encoding="utf-8")).tags.count("svg") == 12
    assert list(tmp_path.iterdir()) == [output]


def test_the_command_as_json(synthetic, capsys, only_this_command):
    assert cli.main(["report", str(synthetic), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.pop("report") == str(synthetic / "report.html")
    assert (synthetic / "report.html").is_file()
    assert answer == RunSummary.from_events(read_events(synthetic)).to_json()
    assert len(answer["losses"]) == 900


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no events.jsonl"),
        (b"", "holds no events yet"),
        (b'{"torn', "holds no events yet"),
        (b"damage\n", "events.jsonl:1: not a JSON object"),
    ],
)
def test_bad_input(tmp_path, capsys, only_this_command, content, complaint):
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    (tmp_path / "report.html").write_text("the old one")
    assert cli.main(["report", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert complaint in output.err
    assert output.err.count("\n") == 1
    assert (tmp_path / "report.html").read_text() == "the old one"


def test_bad_places(synthetic, tmp_path, capsys, only_this_command):
    assert cli.main(["report", str(tmp_path / "gone")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert cli.main(["report", str(synthetic), "--output", str(tmp_path / "no" / "a.html")]) == 2
    assert "is no directory; make it first" in capsys.readouterr().err
    assert cli.main(["report", str(synthetic), "--output", str(tmp_path)]) == 2
    assert "is a directory; name a file in it" in capsys.readouterr().err


def test_without_matplotlib(synthetic, capsys, only_this_command, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert cli.main(["report", str(synthetic)]) == 2
    error = capsys.readouterr().err
    assert "needs matplotlib; install with: pip install 'megatron-resilient[tools]'" in error
