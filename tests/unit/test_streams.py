"""Schedules are checked before they run, and run as they stand, on threads."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch

from megatron_resilient.comm import streams
from megatron_resilient.comm.pipeline import Schedule, same_chunk
from megatron_resilient.comm.streams import CudaStreams, ThreadStreams, streams_for
from megatron_resilient.errors import PlanError

NEEDS = {
    "allgather": ["dispatch"],
    "expert": ["allgather"],
    "reducescatter": ["expert"],
    "combine": ["reducescatter"],
}


def moe(degree, rs_first=False, gradients=0):
    chunks = range(degree)
    intra = [("allgather", i) for i in chunks] + [("reducescatter", i) for i in chunks]
    if rs_first:
        intra.sort(key=lambda key: (key[1], key[0]))
    lanes = {
        "inter": [
            *(("dispatch", i) for i in chunks),
            *(("gradient", i) for i in range(gradients)),
            *(("combine", i) for i in chunks),
        ],
        "intra": intra,
        "compute": [("expert", i) for i in chunks],
    }
    return Schedule(lanes, same_chunk(lanes, NEEDS))


def functions(x, log):
    parts = x.tensor_split(4)

    def step(name, f):
        def run(chunk, *inputs):
            log.append((name, chunk, threading.current_thread().name))
            return f(chunk, *inputs)

        return run

    return {
        "dispatch": step("dispatch", lambda i: parts[i] + 1),
        "allgather": step("allgather", lambda i, y: torch.cat([y, y])),
        "expert": step("expert", lambda i, y: y * 2),
        "reducescatter": step("reducescatter", lambda i, y: y[: len(y) // 2] + y[len(y) // 2 :]),
        "combine": step("combine", lambda i, y: y - 1),
        "gradient": step("gradient", lambda i: None),
    }


@pytest.mark.parametrize("rs_first", [False, True])
def test_results_do_not_depend_on_the_order(rs_first):
    x, log = torch.arange(10.0), []
    schedule = moe(4, rs_first, gradients=2)
    outcome = ThreadStreams().run(schedule, functions(x, log))
    assert set(outcome.results) == {
        *(("combine", i) for i in range(4)),
        *(("gradient", i) for i in range(2)),
    }
    combined = torch.cat([outcome.results["combine", i] for i in range(4)])
    assert torch.equal(combined, (x + 1) * 4 - 1)
    for lane, keys in schedule.lanes.items():
        thread = threading.current_thread().name if lane == "compute" else lane
        assert [(name, i) for name, i, by in log if by == thread] == list(keys)


def test_spans_say_what_ran_when():
    def wait(chunk, *_):
        time.sleep(0.02)

    schedule = moe(2)
    outcome = ThreadStreams().run(schedule, dict.fromkeys(["dispatch", *NEEDS], wait))
    spans = {span.key: span for span in outcome.spans()}
    assert set(spans) == set(schedule.uses)
    for key, needs in schedule.needs.items():
        assert all(spans[need].end_seconds <= spans[key].start_seconds for need in needs)
    assert all(span.end_seconds - span.start_seconds >= 0.02 for span in spans.values())
    # The next dispatch does not wait for the chunk before it.
    assert spans["dispatch", 1].start_seconds < spans["combine", 0].start_seconds


def test_the_issue_order_keeps_streams_and_needs():
    schedule = moe(3, gradients=1)
    place = {key: i for i, (_, key) in enumerate(schedule.order)}
    assert set(place) == set(schedule.uses)
    for keys in schedule.lanes.values():
        assert [place[key] for key in keys] == sorted(place[key] for key in keys)
    for key, needs in schedule.needs.items():
        assert all(place[need] < place[key] for need in needs)


@pytest.mark.parametrize(
    ("lanes", "needs", "message"),
    [
        ({"a": [("x", 0), ("x", 0)]}, {}, "x of chunk 0 stands twice"),
        ({"a": [("x", 0)]}, {("x", 0): [("y", 0)]}, "needs y of chunk 0, which no stream runs"),
        (
            {"a": [("x", 0), ("x", 1)], "b": [("y", 0)]},
            {("x", 0): [("y", 0)], ("y", 0): [("x", 1)]},
            "waits in a circle: x of chunk 0, y of chunk 0",
        ),
    ],
)
def test_schedules_that_cannot_run(lanes, needs, message):
    with pytest.raises(PlanError, match=message):
        Schedule(lanes, needs)


@pytest.mark.parametrize("where", ["dispatch", "allgather", "expert", "combine"])
def test_an_error_of_any_stream_reaches_the_caller_and_stops_the_others(where):
    log = []
    all_of = functions(torch.arange(8.0), log)
    good = all_of[where]

    def bad(chunk, *inputs):
        if chunk == 1:
            raise ValueError("broken")
        return good(chunk, *inputs)

    before = threading.active_count()
    with pytest.raises(ValueError, match="broken") as caught:
        ThreadStreams().run(moe(4), all_of | {where: bad})
    assert any(f"in {where} of chunk 1 on stream" in note for note in caught.value.__notes__)
    assert threading.active_count() == before
    assert (where, 2) not in [(name, chunk) for name, chunk, _ in log]
    assert ("combine", 3) not in [(name, chunk) for name, chunk, _ in log]


def test_an_error_does_not_wait_for_ever_for_a_stream_that_is_stuck(monkeypatch):
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.05)
    release = threading.Event()

    def fail(chunk):
        raise ValueError("broken")

    schedule = Schedule({"inter": [("hang", 0)], "compute": [("fail", 0)]})
    try:
        with pytest.raises(ValueError, match="broken") as caught:
            ThreadStreams().run(schedule, {"hang": lambda i: release.wait(20), "fail": fail})
        assert "stream inter is still in an operation" in caught.value.__notes__
    finally:
        release.set()


@pytest.mark.parametrize("grad", [False, True])
def test_streams_have_the_grad_mode_of_the_caller(grad):
    schedule = Schedule({lane: [(lane, 0)] for lane in ("inter", "intra", "compute")})
    modes = dict.fromkeys(schedule.lanes, lambda chunk: torch.is_grad_enabled())
    with torch.set_grad_enabled(grad):
        outcome = ThreadStreams().run(schedule, modes)
    assert set(outcome.results.values()) == {grad}


def test_results_are_dropped_once_used():
    alive = {}
    seen = []

    def dispatch(chunk):
        made = torch.ones(4)
        alive[chunk] = weakref.ref(made)
        return made

    def expert(chunk, x):
        seen.append([i for i, made in alive.items() if i < chunk and made() is not None])

    lanes = {"compute": [(n, i) for i in range(4) for n in ("dispatch", "expert")]}
    schedule = Schedule(lanes, same_chunk(lanes, {"expert": ["dispatch"]}))
    ThreadStreams().run(schedule, {"dispatch": dispatch, "expert": expert})
    assert seen == [[]] * 4


def test_an_error_keeps_no_tensor_alive():
    made = []

    def dispatch(chunk):
        tensor = torch.ones(4)
        made.append(weakref.ref(tensor))
        return tensor

    def fail(chunk, x):
        raise ValueError("broken")

    lanes = {"inter": [("dispatch", 0)], "compute": [("expert", 0)]}
    schedule = Schedule(lanes, same_chunk(lanes, {"expert": ["dispatch"]}))
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                ThreadStreams().run(schedule, {"dispatch": dispatch, "expert": fail})
        assert [ref() for ref in made] == [None] * 3
    finally:
        gc.enable()


def test_each_device_has_its_streams():
    assert isinstance(streams_for(torch.device("cpu")), ThreadStreams)
    assert isinstance(streams_for(torch.device("cuda", 0)), CudaStreams)
