"""What docs/scale.md computes is what the code does, and what was quadratic is so no more."""

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale_model as model
from benchmarks import scale_page
from benchmarks.scale_members import SETTINGS, beat, kept_state
from benchmarks.scale_model import MODEL, Cluster
from benchmarks.scale_planning import plan_stage, plan_state
from benchmarks.scale_storage import events_cost, manifest_of, records_cost
from megatron_resilient.algorithms.refill_plan import Copy, Piece, plan_refill
from megatron_resilient.checkpoint.coverage import validate
from megatron_resilient.elastic import protocol
from megatron_resilient.elastic.membership import Membership
from megatron_resilient.elastic.messages import Hello, Ready, Seated
from megatron_resilient.elastic.orders import Log, Record, Send
from megatron_resilient.elastic.roster import Process, Roster
from megatron_resilient.elastic.rules import Rules
from megatron_resilient.elastic.world import HeldWorld, Seat
from megatron_resilient.errors import ProtocolError

SMALL = Cluster(8, stages=4, gpus=8, slots=32)


class Counted(Roster):
    """A roster that counts how often all of it is looked at."""

    looks = 0

    def values(self):
        Counted.looks += 1
        return super().values()


def job(nodes, local_world=2):
    """Returns a machine whose workers are all ready, and their connections."""
    machine = Membership(Rules(max_nodes=nodes), 0.0)
    machine._job.processes = Counted()
    for second in range(8):  # one that is young waits for members of a job that lives
        machine.tick(float(second))
    machine.store_opened(7.0, 1, 1234)
    keys = []
    for node in range(nodes):
        for rank in range(local_world):
            keys.append(len(keys) + 1)
            hello = Hello("worker", f"n{node}", f"process-{keys[-1]}", rank, local_world, keys[-1])
            machine.connected(7.0, keys[-1], hello, "h", more=True)
    return machine, keys


def test_what_members_say_does_not_have_all_of_them_looked_at():
    looks = {}
    for nodes in (4, 40):
        machine, keys = job(nodes)
        ready = Ready({"generation": 0, "coordinate": None, "grid": [1, 1, 1]}, SETTINGS, 0)
        for key in keys:
            machine.received(7.0, key, ready, more=True)
        told = machine.tick(7.1)
        assert sum(isinstance(order, Send) for order in told) == len(keys)
        Counted.looks = 0
        for key in keys:
            assert machine.received(7.2, key, beat()) == []
        assert Counted.looks == 0
        before = Counted.looks
        machine.disconnected(7.3, keys[0], more=True)
        looks[nodes] = Counted.looks - before
    assert looks[4] == looks[40] == 0


def test_with_more_to_come_readies_wait_for_the_last_of_them():
    machine, keys = job(3)
    ready = Ready({"generation": 0, "coordinate": None, "grid": [1, 1, 1]}, SETTINGS, 0)
    said = [order for key in keys[:-1] for order in machine.received(7.0, key, ready, more=True)]
    assert not said
    told = machine.received(7.0, keys[-1], ready)
    assert [order.message.rank for order in told if isinstance(order, Send)] == [0, 1, 2, 3, 4, 5]
    joins = [order for order in told if isinstance(order, Record)]
    assert [order.fields["member"] for order in joins] == ["n0", "n1", "n2"]
    assert any(isinstance(order, Log) for order in told)


def test_a_roster_knows_the_workers_of_a_node():
    roster = Roster()
    for number, node in enumerate(("a", "b", "a")):
        hello = Hello("worker", node, f"process-{number}")
        roster[hello.id] = Process(hello, number, "h", 0.0, 0.0)
    assert [process.key for process in roster.of("a")] == [0, 2]
    assert roster.of("c") == []
    # Who comes back under another name is still found, and can be removed.
    roster["process-1"].hello = replace(roster["process-1"].hello, node="a")
    assert roster.pop("process-1").key == 1
    assert roster.pop("process-1", None) is None
    assert set(roster.nodes()) == {"a"}
    assert len(roster) == 2
    assert "process-2" in roster


def world(ranks):
    seats = tuple(Seat(f"n{i // 8}", i % 8, kept_state(i, ranks)) for i in range(ranks))
    return Seated(2, seats, 0, "10.0.0.1", 1, "failure", (), (), False, {"formed": 1.0})


def test_a_world_is_packed_once_for_all_of_its_members():
    first = world(64)
    lines = [protocol.encode_parts(replace(first, rank=rank)) for rank in (0, 63)]
    assert lines[0][1] is lines[1][1]
    assert protocol.parse_from_server(b"".join(lines[1])) == replace(first, rank=63)
    assert len(lines[0][1]) < 64 * 60
    # Another world is not taken for it.
    other = replace(first, seats=first.seats[:3])
    assert protocol.parse_from_server(protocol.encode(other)) == other


@pytest.mark.parametrize(
    "packed", ["!", "AAAA", "eJw=", protocol._packs.pack(world(8).seats)[:-8].decode()]
)
def test_seats_that_cannot_be_read_are_a_protocol_error(packed):
    line = protocol.encode(world(2))
    damaged = re.sub(rb'"seats":"[^"]*"', f'"seats":"{packed}"'.encode(), line)
    with pytest.raises(ProtocolError, match="seats that cannot be read"):
        protocol.parse_from_server(damaged)


def test_seats_that_are_too_long_are_not_unpacked(monkeypatch):
    line = protocol.encode(world(64))
    monkeypatch.setitem(protocol._MAX_SEATS_BYTES, Seated, 1000)
    monkeypatch.setattr(protocol, "_packs", protocol._Packs())
    with pytest.raises(ProtocolError, match="too long"):
        protocol.parse_from_server(line)


def test_who_comes_back_tells_the_same_text_and_it_is_read_once():
    seats = tuple(Seat(f"n{number}", 0, {}) for number in range(50))
    held = HeldWorld(generation=2, formed=1.5, seats=seats, step=7, training=True)
    hello = Hello("worker", "n0", "process-1", world=held)
    line = protocol.encode(protocol.sign(hello, "challenge", b"token"))
    assert len(line) < 50 * 20
    first, again = (protocol.parse_to_server(line) for _ in range(2))
    assert first.world == held
    assert first.world.seats is again.world.seats
    assert protocol.is_signed(first, "challenge", b"token")
    # Another compression of the same seats is still its sender's own text.
    text = zlib.compress(json.dumps([vars(seat) for seat in seats]).encode(), 9)
    other = json.loads(line) | {"mac": ""}
    other["world"]["seats"] = base64.b64encode(text).decode()
    told = protocol.parse_to_server(json.dumps(other).encode())
    assert base64.b64encode(text) in protocol.encode(told)


def test_after_a_restart_the_rest_are_awaited_while_others_come_back():
    machine = Membership(Rules(), 0.0)  # 6 s without a sign
    seats = tuple(Seat(f"n{number}", 0, {}) for number in range(3))
    held = HeldWorld(generation=2, formed=1.5, seats=seats, step=7, training=True)

    machine.connected(0.0, 0, Hello("worker", "n0", "process-0", world=held), "h")
    for second in range(1, 6):
        machine.received(float(second), 0, beat())
        assert not machine.tick(float(second))
    machine.connected(5.0, 1, Hello("worker", "n1", "process-1", world=held), "h")
    for second in (6.0, 7.0):
        machine.received(second, 0, beat())
        machine.received(second, 1, beat())
        assert not machine.tick(second)
    told = [order.text for order in machine.tick(8.5) if isinstance(order, Log)]
    assert any("n2 is lost" in text for text in told)


def test_what_a_rank_has_is_not_looked_for_among_all_holders(monkeypatch):
    everybody = [[Piece("dense", 0, 8)]] * 200
    monkeypatch.setattr("megatron_resilient.algorithms.refill_plan._cut", None)
    plan = plan_refill(everybody, everybody, ["n"] * 200)
    assert plan.copies == tuple(Copy(Piece("dense", 0, 8), rank, rank) for rank in range(200))


def test_sizes_of_the_model_are_those_that_are_said():
    assert MODEL.expert_parameters == 44_040_192
    assert model.save_bytes() == 12 * (58 * 256 * 44_040_192 + 17_000_000_000)
    thousand = Cluster.of(1000)
    assert (thousand.ranks, thousand.expert_ranks, thousand.slots) == (8000, 500, 2)
    assert Cluster.of(10_000).slots == 1
    assert thousand.without_a_node().ranks == 499 * 16


def test_bytes_that_are_computed_are_those_of_the_parts():
    cluster = Cluster(2, stages=1, gpus=1, slots=MODEL.experts)  # every expert on both ranks
    expert = MODEL.moe_layers * MODEL.experts * MODEL.expert_parameters
    assert model.expert_bytes(cluster) == 18 * expert
    # With two holders each sends half of a gradient, and gets the other half summed.
    assert model.replica_sum_bytes(cluster) == 4 * expert
    assert model.counts_bytes(cluster) == 2 * 256 * 8
    whole = model.dense_bytes(cluster, sharded=False, mirrored=False)
    assert whole == 18 * 17_000_000_000
    sharded = model.dense_bytes(cluster, sharded=True, mirrored=False)
    assert whole - sharded == 6 * 17_000_000_000
    assert model.dense_bytes(cluster, sharded=True, mirrored=True) - sharded == 8 * 17_000_000_000
    assert model.dispatch_bytes(10) == 4 * 10 * 8 * 7168 * 2
    assert model.recovery_bytes(cluster, 1) == (12 * expert, 12 * expert)
    assert model.beats_per_second(cluster) == 4
    assert model.mesh_beats_per_second(cluster) == 2


def test_planning_splits_local_first():
    planned = plan_stage(SMALL)
    assert planned.remote_local < planned.remote_even < 1
    assert planned.imbalance < 1.1
    assert set(planned.seconds) == {
        "placement",
        "token split",
        "own part of the split",
        "placement after a loss",
        "migration",
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_has_as_many_files_as_computed(sharded):
    seconds, writes, told_bytes = plan_state(SMALL, sharded)
    assert min(seconds.values()) >= 0
    assert told_bytes > 100
    if sharded:
        manifest = manifest_of(SMALL, writes)
        experts = {file.expert for file in manifest.files} - {None}
        layers = SMALL.stages * SMALL.stage_layers
        assert len(experts) == layers * MODEL.experts
        # One file for each expert and one of dense state for each rank: bytes even out so.
        assert len(manifest.files) <= layers * MODEL.experts * 1.2 + SMALL.ranks
        validate(manifest, "manifest")


def test_events_and_records_are_counted(tmp_path):
    cost = events_cost(4, tmp_path / "run")
    assert cost["events"] == 10 + MODEL.moe_layers
    assert cost["bytes"] > 0
    told, taken = records_cost(5, tmp_path / "records")
    assert told > 0
    assert taken > 0
    assert not list((tmp_path / "records").iterdir())


@pytest.mark.slow  # imports Megatron
def test_groups_are_those_that_megatron_makes():
    from benchmarks.scale_groups import count_calls

    assert count_calls(64, 16)[0] == model.group_calls(Cluster(8, stages=16))


def test_the_page_says_what_is_computed():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    for line in scale_page.lines():
        assert line in page
