import pytest

from megatron_resilient.errors import TelemetryError
from megatron_resilient.report.schedules import Schedules
from megatron_resilient.telemetry import EventLog, read_events

LANES = {"inter": [["dispatch", 0, 0.0, 0.001]], "intra": [], "compute": []}


def event(layer, phase, seconds, **more):
    return {
        "event": "schedule",
        "layer": layer,
        "phase": phase,
        "degree": 1,
        "planned_seconds": seconds,
        "planned": LANES,
        **more,
    }


def test_the_newest_of_each_pass_and_the_slowest_layer():
    found = Schedules.of(
        [
            event(2, "backward", 9.0),
            event(1, "forward", 1.0),
            event(2, "forward", 2.0),
            event(1, "backward", 3.0),
            event(2, "backward", 4.0),
        ]
    )
    keys = [(1, "forward"), (1, "backward"), (2, "forward"), (2, "backward")]
    assert list(found.passes) == keys
    assert found.passes[2, "backward"]["planned_seconds"] == 4.0
    assert found.layers == [1, 2]
    assert list(found.drawn) == ["forward", "backward"]
    assert found.drawn["backward"]["layer"] == 2


def test_a_measured_layer_is_drawn_first():
    found = Schedules.of([event(1, "forward", 1.0, measured=LANES), event(2, "forward", 5.0)])
    assert found.drawn["forward"]["layer"] == 1


def test_nothing_to_draw():
    assert Schedules.of([]) is None
    assert Schedules.of([event(1, "forward", 1.0, planned={"inter": []})]) is None


@pytest.mark.parametrize(
    "planned",
    [
        [],
        {"inter": 1},
        {"inter": [["dispatch", 0, 1.0]]},
        {"inter": [["dispatch", 0, 2.0, 1.0]]},
        {"inter": [["dispatch", 0.5, 0.0, 1.0]]},
        {"inter": [[1, 0, 0.0, 1.0]]},
        {"inter": [["dispatch", 0, 0.0, float("nan")]]},
    ],
)
def test_operations_that_are_none(tmp_path, planned):
    fields = {**event(1, "forward", 1.0), "planned": planned}
    del fields["event"]
    with EventLog(tmp_path, rank=0) as log:
        with pytest.raises(TelemetryError, match="'planned' must be stream -> operations"):
            log.emit("schedule", 1, **fields)
        log.emit("schedule", 1, **{**fields, "planned": LANES})
    assert read_events(tmp_path)[0]["planned"] == LANES
