import json
import math
import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry import COMMON, KINDS, EventLog, number, read_events
from megatron_resilient.telemetry import log as log_module

RESERVED = {field.name for field in COMMON}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def as_json_has_it(value):
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [as_json_has_it(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json_has_it(item) for key, item in value.items()}
    return value


@settings(deadline=None)
@given(
    extra=st.dictionaries(
        st.text(min_size=1).filter(lambda name: name not in RESERVED | {"self", "message", "type"}),
        JSON_VALUES,
        max_size=4,
    ),
    step=st.none() | st.integers(min_value=0, max_value=2**63 - 1),
    rank=st.none() | st.integers(min_value=0, max_value=2**63 - 1),
    generation=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_what_is_written_is_read(extra, step, rank, generation):
    with tempfile.TemporaryDirectory() as run_dir:
        with EventLog(run_dir, rank=rank, generation=generation, clock=lambda: 12.5) as log:
            log.emit("error", step, message="m", **extra)
        assert read_events(run_dir) == [
            {
                "time": 12.5,
                "event": "error",
                "step": step,
                "generation": generation,
                "rank": rank,
                "message": "m",
                **as_json_has_it(extra),
            }
        ]


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    with EventLog(tmp_path, rank=0) as log:
        log.emit(
            "step",
            1,
            loss={"lm loss": math.nan, "z": -math.inf},
            seconds=1.0,
            tokens=8,
            grad_norm=math.inf,
        )

    def refuse(name):
        raise AssertionError(name)

    text = log.path.read_text()
    assert json.loads(text, parse_constant=refuse)["grad_norm"] == "inf"
    (event,) = read_events(tmp_path)
    assert math.isnan(number(event["loss"]["lm loss"]))
    assert number(event["loss"]["z"]) == -math.inf
    assert number(event["grad_norm"]) == math.inf


def test_who_writes_follows_a_recovery(tmp_path):
    with EventLog(tmp_path / "new" / "run", rank=3, node="n1") as log:
        log.emit("member_leave", 7, member="n0")
        log.rank, log.generation = 1, 2
        log.emit("member_join", member="n9")
    first, second = read_events(tmp_path / "new" / "run")
    assert (first["rank"], first["generation"], first["node"], first["step"]) == (3, 0, "n1", 7)
    assert (second["rank"], second["generation"], second["step"]) == (1, 2, None)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.float64(1.0), "numpy.float64"),
        (np.int32(1), "numpy.int32"),
        (np.zeros(2), "numpy.ndarray"),
        (Path("a"), "Path"),
        ({1: 2}, "the key 1"),
        ({"a": [1, np.float32(2)]}, r"note\[a\]\[1\] is a numpy.float32"),
        ({1, 2}, "set"),
    ],
)
def test_only_plain_values(tmp_path, value, named):
    with EventLog(tmp_path, rank=0) as log:
        with pytest.raises(TypeError, match=named):
            log.emit("error", message="m", note=value)
        assert log.path.read_bytes() == b""


STEP = {"loss": {"lm loss": 1.0}, "seconds": 1.0, "tokens": 4}


@pytest.mark.parametrize(
    ("event", "step", "fields", "complaint"),
    [
        ("stepp", 1, STEP, "no event is called 'stepp'"),
        ("step", None, STEP, "needs the step"),
        ("step", 1, {"loss": {"lm loss": 1.0}, "seconds": 1.0}, "'tokens'"),
        ("step", 1, STEP | {"tokens": 4.0}, "'tokens' must be int"),
        ("step", 1, STEP | {"seconds": math.nan}, "'seconds' must be finite number"),
        ("step", 1, STEP | {"seconds": True}, "'seconds' must be finite number"),
        ("step", 1, STEP | {"loss": 1.0}, "'loss' must be name -> number"),
        ("step", 1, STEP | {"time": 3.0}, "the log itself writes time"),
        ("step", "1", STEP, "'step' must be int or null"),
        ("expert_load", 1, {"layer": 0, "tokens": [], "steps": 1}, "'tokens' must be counts"),
        ("expert_load", 1, {"layer": 0, "tokens": [1, -1], "steps": 1}, "'tokens' must be counts"),
        ("member_join", None, {"member": 3}, "'member' must be text"),
        ("run_end", None, {}, "'exit'"),
    ],
)
def test_events_that_are_not_as_documented(tmp_path, event, step, fields, complaint):
    with EventLog(tmp_path, rank=0) as log:
        with pytest.raises(TelemetryError, match=complaint):
            log.emit(event, step, **fields)
        assert log.path.read_bytes() == b""


def write_many(run_dir, rank, barrier):
    with EventLog(run_dir, rank=rank) as log:
        barrier.wait(timeout=60)
        for index in range(200):
            log.emit("error", index, message=f"{rank}:" + "x" * (37 * index % 9000))


def test_processes_share_the_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    writers = [context.Process(target=write_many, args=(tmp_path, r, barrier)) for r in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    events = read_events(tmp_path)
    assert len(events) == 600
    for rank in range(3):
        mine = [event for event in events if event["rank"] == rank]
        assert [event["step"] for event in mine] == list(range(200))
        for event in mine:
            assert event["message"] == f"{rank}:" + "x" * (37 * event["step"] % 9000)


def error_event(run_dir, message):
    with EventLog(run_dir, rank=0) as log:
        log.emit("error", message=message)


@settings(deadline=None)
@given(cut=st.integers(min_value=1, max_value=1000))
def test_an_unfinished_last_line_harms_no_other(cut):
    with tempfile.TemporaryDirectory() as run_dir:
        error_event(run_dir, "first")
        error_event(run_dir, "second")
        path = Path(run_dir) / "events.jsonl"
        first, second = path.read_bytes().splitlines(keepends=True)
        torn = second[: -(1 + cut % (len(second) - 1))]
        path.write_bytes(first + torn)
        # Without its line end alone, the object is whole.
        kept = ["first", "second"] if torn == second[:-1] else ["first"]
        assert [event["message"] for event in read_events(run_dir)] == kept
        error_event(run_dir, "third")
        assert [event["message"] for event in read_events(run_dir)] == [*kept, "third"]
        assert path.read_bytes().startswith(first + torn + b" #torn\n")


def test_a_living_writer_closes_the_line_of_a_killed_one(tmp_path):
    with EventLog(tmp_path, rank=0) as living:
        living.emit("error", message="before")
        with living.path.open("ab") as killed:
            killed.write(b'{"time": 1.0, "ev')
        living.emit("error", message="after")
    assert [event["message"] for event in read_events(tmp_path)] == ["before", "after"]


def test_a_seal_that_came_late_stands_alone(tmp_path):
    error_event(tmp_path, "a")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(log_module.TORN_SEAL)
    error_event(tmp_path, "b")
    assert [event["message"] for event in read_events(tmp_path)] == ["a", "b"]


def test_a_write_that_falls_short_is_an_error_and_is_closed(tmp_path, monkeypatch):
    real_write = os.write
    with EventLog(tmp_path, rank=0) as log:
        with monkeypatch.context() as patch:
            patch.setattr(log_module.os, "write", lambda fd, data: real_write(fd, data[:9]))
            with pytest.raises(OSError, match="wrote 9 of"):
                log.emit("error", message="lost")
        log.emit("error", message="kept")
    assert [event["message"] for event in read_events(tmp_path)] == ["kept"]


WHOLE = '{"time": 1, "event": "failure", "step": 1, "generation": 0, "rank": 0}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"time": 1, "event": "fai', "not a JSON object"),
        (b"", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"[" * 200_000, "not a JSON object"),
        (WHOLE.replace("1,", "NaN,", 1).encode(), "NaN is not JSON"),
        (WHOLE.replace("1,", "1e999,", 1).encode(), "'time' must be finite number"),
        (WHOLE.replace("1,", "1" + "0" * 400 + ",", 1).encode(), "'time' must be finite number"),
        (WHOLE.replace('"step": 1', f'"step": {2**63}').encode(), "'step' must be int or null"),
        (b'{"time": 1, "event": "failure", "step": 1, "generation": 0}', "'rank'"),
        (WHOLE.replace("failure", "step").encode(), "step needs the field 'loss'"),
    ],
)
def test_damage_elsewhere_is_named(tmp_path, line, complaint):
    path = tmp_path / "events.jsonl"
    path.write_bytes(WHOLE.encode() + b"\n" + line + b"\n" + WHOLE.encode() + b"\n")
    with pytest.raises(TelemetryError, match=r"events\.jsonl:2: .*" + complaint):
        read_events(tmp_path)


def test_a_kind_of_a_later_version_is_kept(tmp_path):
    (tmp_path / "events.jsonl").write_text(WHOLE.replace("failure", "reticulated") + "\n")
    assert read_events(tmp_path)[0]["event"] == "reticulated"


def test_where_there_is_nothing_to_read(tmp_path):
    with pytest.raises(TelemetryError, match="no such directory"):
        read_events(tmp_path / "gone")
    with pytest.raises(TelemetryError, match=r"holds no events\.jsonl"):
        read_events(tmp_path)
    (tmp_path / "events.jsonl").touch()
    assert read_events(tmp_path) == []


def test_closed_is_closed(tmp_path):
    log = EventLog(tmp_path, rank=0)
    log.close()
    log.close()
    with pytest.raises(TelemetryError, match="closed"):
        log.emit("error", message="m")


def test_the_docs_list_every_kind_and_field():
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    for kind in KINDS.values():
        _, section = page.split(f"### `{kind.name}`\n")
        section = section.split("###")[0]
        assert kind.meaning[1:] in section
        for field in kind.fields:
            presence = "always" if field.required else ""
            row = f"| `{field.name}` | {field.type} | {presence} | {field.meaning} |\n"
            assert section.count(row) == 1
    for field in COMMON:
        assert f"| `{field.name}` | {field.type} |" in page.split("### Every event")[1]
