"""What a simulation is made of: costs, systems, placements, saves."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.lost_tokens import DynamicK, expected_share
from megatron_resilient.algorithms.rank_plan import plan_layers
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.errors import ConfigError, PlanError, TelemetryError
from megatron_resilient.simulation.calibration import costs_of_run
from megatron_resilient.simulation.compare import Options, choose_settings, planned_overlap
from megatron_resilient.simulation.costs import GIB, Costs, SaveCost, read_costs, write_costs
from megatron_resilient.simulation.failures import draw_failures
from megatron_resilient.simulation.placements import EXACT_NODES, planned, stock_group_ranks
from megatron_resilient.simulation.policy import Fate, Policy, World
from megatron_resilient.simulation.recommendation import recommend, survivable
from megatron_resilient.simulation.saves import Saves
from megatron_resilient.simulation.systems import DEFAULT_SYSTEMS, parse_system
from megatron_resilient.telemetry import EventLog
from tests.support.simulated import PLAIN, outcome, trace, workload

# Costs and systems.


def test_calibrations_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "calibration.json"
    costs = replace(Costs(), step_seconds=3.5, our_save=SaveCost(1, 2, 3, 4), source="a run")
    write_costs(costs, path)
    assert read_costs(path) == costs
    path.write_text('{"restart_seconds": 60}')
    assert read_costs(path) == replace(Costs(), restart_seconds=60, source=str(path))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({"restart": 1}, "'restart' is not one of"),
        ({"restart_seconds": "1"}, 'restart_seconds is "1"'),
        ({"restart_seconds": -1}, "restart_seconds is -1"),
        ({"our_save": {"stall": 1}}, "our_save: 'stall' is not one of"),
        ({"our_save": {"stall_seconds": -1}}, "our_save.stall_seconds is -1"),
        ({"our_save": 1}, "our_save: expected an object"),
        ({"expert_share": 2}, "expert_share at most 1"),
        ({"step_seconds": 0}, "step_seconds"),
        ({"relative_steps": {"3": "x"}}, "relative_steps must be an object of numbers"),
        ({"relative_steps": {"0": 1}}, "relative_steps has '0': 1"),
        ({"relative_steps": {"3": 0}}, "relative_steps has '3': 0"),
        ({"relative_steps": {"3": 1, "03": 2}}, "relative_steps has '03': 2"),
        ({"source": ["a run"]}, "source is .* must be a text"),
        ({"restart_seconds": 1e300}, "restart_seconds is 1e.300"),
        ({"restart_seconds": 10**400}, "restart_seconds is 1000"),
        ({"step_seconds": 1e-300}, "step_seconds and overlap_speedup"),
    ],
)
def test_calibrations_that_cannot_be(tmp_path, document, message):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message) as raised:
        read_costs(path)
    assert str(raised.value).startswith(str(path))
    for text in (b"{", b"[" * 100_000, b'{"a": ' + 5000 * b"9" + b"}"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="not JSON"):
            read_costs(path)
    path.write_bytes(b"{}\xff")
    with pytest.raises(ConfigError, match="no text in UTF-8, from byte 2 on"):
        read_costs(path)


def test_the_mark_of_windows_is_passed_over(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"restart_seconds": 60}', encoding="utf-8-sig")
    assert read_costs(path).restart_seconds == 60


def test_names_of_systems_are_those_that_they_are_parsed_from():
    for name in (*DEFAULT_SYSTEMS, "groups", "no-replicas+pec"):
        assert parse_system(name).name == name
    assert parse_system("ours+overlap+pec").name == "ours+pec+overlap"
    for wrong in ("mine", "restart+pec", "ours+fast", "ours+", ""):
        with pytest.raises(ConfigError, match="use one of restart"):
            parse_system(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"ranks_per_node": 3},
        {"loads": ()},
        {"loads": ((1, 2), (1,))},
        {"nodes": 1, "slots_per_node": 2},
        {"slots_per_node": 5},
        {"expert_bytes": -1.0},
        {"min_nodes": 5},
    ],
)
def test_workloads_that_cannot_be(wrong):
    with pytest.raises(PlanError):
        workload(**wrong)


def test_a_step_is_as_long_as_the_rank_with_most_microbatches():
    own = workload(nodes=4, microbatches=8)
    assert [own.relative_step(nodes) for nodes in (4, 3, 2, 1)] == [1, 1.5, 2, 4]
    assert workload(nodes=4).relative_step(3) == pytest.approx(4 / 3)


# Placements.


def test_placements_are_those_of_training():
    own = workload(nodes=6, experts=8, slots=3)
    slots = planned(own, 3, 2).slots(5)
    assert slots.tolist() == plan_layers(own.loads, 5, 1, 3, 2)


def test_experts_are_lost_with_all_their_nodes():
    own = workload(nodes=6, experts=8, slots=3)
    placements = planned(own, 3, 2)
    slots = placements.slots(6)
    for first in range(6):
        for second in range(first):
            left = np.delete(slots, [first, second], axis=1)
            gone = [(la, e) for la in range(2) for e in range(8) if e not in left[la]]
            assert placements.lost_experts(6, [first, second]) == gone
    assert survivable(own, 2) >= 1
    assert survivable(own, 1) == 0


def test_a_move_counts_what_nodes_do_not_hold_yet():
    own = workload(nodes=6, experts=8, slots=3)
    placements = planned(own, 3, 2)
    assert placements.move(6, list(range(6)), 6) == (list(range(6)), 0)
    order, most = placements.move(6, [0, 1, 2, 4, 5], 5)
    assert sorted(order) == list(range(5))
    before = [0, 1, 2, 4, 5]
    got = [
        sum(
            len(set(placements.slots(5)[la, part]) - set(placements.slots(6)[la, before[node]]))
            for la in range(2)
        )
        for part, node in enumerate(order)
    ]
    assert most >= max(got) > 0


def test_large_clusters_are_planned_for_some_sizes_only():
    own = workload(nodes=200, experts=16, slots=2)
    placements = planned(own, 2, 2)
    assert placements.lost_experts(190, [3]) == []
    assert placements.slots.cache_info().currsize == 0  # two replicas: no need to look
    assert len(placements.lost_experts(190, range(180))) > 0
    assert placements.slots.cache_info().currsize == 1
    assert placements.imbalance(199) == placements.imbalance(200)
    assert placements.imbalance(199) < 1.3
    order, most = placements.move(200, list(range(199)), 199)
    assert order == list(range(199))
    assert most > 0
    assert EXACT_NODES < 190


@pytest.mark.parametrize(
    ("experts", "slots", "nodes"),
    [(8, 6, 2), (12, 6, 2), (16, 6, 4)],  # Lazarus, section 6.1: EP 2, 2 and 4
)
def test_groups_of_stock_are_those_of_the_paper(experts, slots, nodes):
    own = workload(nodes=10, experts=experts, slots=slots)
    assert stock_group_ranks(own) == nodes
    assert Policy(parse_system("groups"), own, PLAIN).most_nodes == 10 // nodes * nodes


def test_groups_fit_nodes():
    own = workload(nodes=4, experts=12, slots=8, ranks_per_node=4)
    assert stock_group_ranks(own) == 12  # 6 would be a node and a half
    with pytest.raises(PlanError, match="groups needs 3 nodes"):
        Policy(parse_system("groups"), replace(own, nodes=2), PLAIN)
    seven = workload(nodes=4, experts=7, slots=4, ranks_per_node=2)
    with pytest.raises(PlanError, match="no expert-parallel group for 7 experts on nodes of 2"):
        stock_group_ranks(seven)
    assert stock_group_ranks(replace(seven, slots_per_node=14)) == 1


# Policies.


def test_steps_follow_imbalance_and_overlap():
    costs = replace(
        PLAIN, expert_share=0.5, step_seconds=2.0, overlap_speedup=2.0, resilience_overhead=0.1
    )
    own = workload(nodes=4, experts=8, slots=4, loads=((700, *[100] * 7),) * 2)
    stock = Policy(parse_system("restart"), own, costs)
    # Groups of two ranks, the first with 1000 of 1400 tokens.
    assert stock.placements.imbalance(4) == pytest.approx(10 / 7)
    assert stock.step_seconds(4) == pytest.approx(2 * (0.5 + 0.5 * 10 / 7))
    ours = Policy(parse_system("ours"), own, costs, min_replicas=1)
    assert ours.placements.imbalance(4) < 1.1
    assert ours.step_seconds(4) == pytest.approx(
        2 * (0.5 + 0.5 * ours.placements.imbalance(4)) * 1.1
    )
    assert ours.undisturbed_step_seconds == pytest.approx(ours.step_seconds(4) / 1.1)
    overlapped = Policy(parse_system("ours+overlap"), own, costs, min_replicas=1)
    gain = ours.step_seconds(4) - overlapped.step_seconds(4)
    assert gain == pytest.approx(2 * 0.25 * ours.placements.imbalance(4) * 1.1)


def test_recoveries_take_what_they_copy_and_read():
    costs = replace(PLAIN, load_seconds_per_gib=8.0, refill_seconds_per_gib=2.0)
    own = workload(nodes=4, experts=4, slots=2, expert_bytes=GIB, dense_bytes=3 * GIB)
    ours = Policy(parse_system("ours"), own, costs)
    # 3 + 2 layers x 4 experts = 11 GiB on 4 ranks to be read, at 8 s; two moves of 1 GiB at 2 s.
    world = World(("a", "b", "c", "d"), moved=2)
    assert ours.recovery_seconds(Fate(False), world) == pytest.approx(5 + 4)
    assert ours.recovery_seconds(Fate(True), world) == pytest.approx(5 + 22)
    assert ours.recovery_seconds(Fate(False, ((0, 1),)), world) == pytest.approx(5 + 4 + 22)
    newcomer = replace(world, newcomers=1)
    assert ours.join_seconds(newcomer) == pytest.approx(5 + 4 + 6)
    restart = Policy(parse_system("restart"), own, costs)
    assert restart.recovery_seconds(Fate(True), world) == pytest.approx(20 + 22)


def test_saves_of_a_rank_are_those_of_the_write_plan():
    own = workload(nodes=4, experts=4, slots=4, expert_bytes=1e9, dense_bytes=4e9)
    ours = Policy(parse_system("ours"), own, PLAIN)
    # All ranks hold all: each writes a quarter.
    assert ours.save_bytes.of_rank(4, 4) == pytest.approx(12e9 / 4, rel=0.02)
    assert ours.save_bytes.of_rank(1, 4) == pytest.approx(6e9 / 4, rel=0.02)
    single = replace(own, slots_per_node=1, dense_bytes=0.0)
    alone = Policy(parse_system("no-replicas"), single, PLAIN)
    # Two experts are wanted, number n of one layer and n + 1 of the other; each has one holder.
    first, second = (row[:, 0].tolist() for row in alone.placements.slots(4))
    alike = sum(first.index(n) == second.index((n + 1) % 4) for n in range(4))
    assert alone.save_bytes.of_rank(1, 4) == pytest.approx((1 + alike / 4) * 1e9, rel=0.02)


# Saves.


def test_partial_saves_lose_as_many_tokens_as_equation_7_says():
    loads = ((1000,) * 8,) * 3
    interval, k, planned_steps = 20, 2, 100_000
    saves = Saves(loads, planned_steps, DynamicK(8, k, 1.0))
    step, shares = 0, []
    for fault in range(60):
        for _ in range(11 + fault % 7):
            step += interval
            saves.begin(step, float(step))
        saves.interrupt(float(step))
        shares.append(saves.roll_back().share)
        assert saves.durable_step == step
    # Of a rotation of 4 saves experts are 0, 1, 2 and 3 intervals old, in the mean 1.5.
    expected = expected_share(interval, 8, k, planned_steps)
    assert sum(shares) / len(shares) == pytest.approx(expected)


def test_saves_on_their_way_are_lost_and_the_one_before_is_not():
    saves = Saves(((10, 10),), 100, DynamicK(2, 2, 1.0))
    saves.begin(10, 12.0)
    saves.begin(20, 24.0)
    saves.interrupt(23.0)
    assert saves.durable_step == 10
    assert saves.roll_back().tokens == 0


def test_an_expert_alone_loses_what_it_learned_since_its_save_once():
    saves = Saves(((10, 30),), 100, DynamicK(2, 2, 1.0))
    saves.begin(10, 10.0)
    saves.interrupt(15.0)
    assert saves.restore_experts([(0, 1)], 15).tokens == 30 * 5
    assert saves.restore_experts([(0, 1)], 17).tokens == 30 * 2
    assert saves.restore_experts([(0, 0)], 17).tokens == 10 * 7
    # A restore of all goes back to the save, where nothing was lost.
    assert saves.durable_step == 10
    assert saves.roll_back().tokens == 0


def test_k_doubles_where_restores_lose_too_much():
    own = workload(nodes=4, experts=8, slots=2)
    events = draw_failures(4, 200.0, 20_000.0, seed=2, repair_seconds=0.0)
    held = outcome("no-replicas+pec", events, own, k=1, lost_tokens=0.0, exact=True)
    grown = outcome("no-replicas+pec", events, own, k=1, lost_tokens=0.01, exact=True)
    assert held.outcome.k == 1
    assert grown.outcome.k > 1
    assert 0 < grown.outcome.lost_tokens < held.outcome.lost_tokens


def test_k_and_interval_are_chosen():
    own = workload(nodes=2, experts=8, slots=8, expert_bytes=GIB)
    costs = replace(PLAIN, our_save=SaveCost(1.0, 1.0, 1.0, 1.0))
    often = draw_failures(2, 200.0, 20_000.0, seed=2, repair_seconds=0.0)

    def chosen(name, events, **options):
        return choose_settings(events, Policy(parse_system(name), own, costs), Options(**options))

    full = chosen("no-replicas", often)
    partial = chosen("no-replicas+pec", often, lost_tokens=2.0)
    assert full.k == 8
    assert partial.k < 8
    assert partial.interval < full.interval
    assert chosen("no-replicas+pec", often, lost_tokens=1e-9).k == 8
    assert chosen("ours+pec", often).k == 1  # single losses never need a checkpoint
    assert chosen("ours+pec", often, k=4, interval=7) == type(full)(7, 4, 0.0375)
    rare = chosen("ours", trace(2, 20_000.0)).interval
    assert rare == pytest.approx(4 * 3600)  # never further apart than that


def test_a_schedule_says_what_overlap_gains():
    link = LinearCost(0.1, 1e-7)
    profile = Profile(link, link, link, link, LinearCost(0.1, 1e-11))
    layers = [LayerWork(6e7, 6e7, 6e7, 4e11)] * 2
    assert 1.5 < planned_overlap(profile, layers, 8) < 4
    assert planned_overlap(profile, layers, 1) == pytest.approx(1)


def test_a_recommendation_keeps_its_limits_and_is_among_what_was_tried():
    own = workload(nodes=6, experts=6, slots=4)
    events = draw_failures(6, 400.0, 30_000.0, seed=3, repair_seconds=60.0)
    costs = replace(PLAIN, expert_share=0.5)
    found = recommend(events, own, costs, Options())
    assert found.choice in found.tried
    assert 2 <= found.choice.slots_per_node <= 4
    assert found.guaranteed_losses >= 1
    assert found.choice.lost_tokens <= 0.0375
    best = max(choice.steps_per_hour for choice in found.tried if choice.lost_tokens <= 0.0375)
    assert found.choice.steps_per_hour >= 0.99 * best
    assert found.result.settings.interval == found.choice.interval
    assert recommend(events, own, costs, Options()).choice == found.choice
    fixed = recommend(events, own, costs, Options(interval=9, k=2))
    assert (fixed.choice.interval, fixed.choice.k) == (9, 2)


# Calibration from a run.


def a_run(folder, nodes=(4, 3, 4), saves=((0.2, 3.0), (0.4, 4.0), (0.3, 5.0))):
    """Steps of 1 s on four nodes and 1.2 s on three; a loss, and the node's return."""
    step = 0
    with EventLog(folder, rank=0) as log:
        log.emit("run_start", world_size=nodes[0])
        for number, world in enumerate(nodes):
            if number:
                lost = ["node3"] if world < nodes[number - 1] else []
                joined = [] if lost else ["node3"]
                seconds = {"detect": 0.5, "rebuild": 2.0 if lost else 1.0, "first_step": 1.6}
                log.emit(
                    "recovery",
                    step,
                    seconds=seconds,
                    lost_nodes=lost,
                    joined_nodes=joined,
                    world_size=world,
                )
            for index in range(9):
                step += 1
                usual = 1.0 if world == 4 else 1.2
                log.emit("step", step, loss={"lm loss": 1.0}, tokens=8, seconds=usual + (index < 3))
        for stall, seconds in saves:
            log.emit("checkpoint_saved", step, path="x", seconds=seconds, stall_seconds=stall)
    return folder


def test_a_run_calibrates(tmp_path):
    found = costs_of_run(a_run(tmp_path))
    assert found.step_seconds == pytest.approx(1.0)
    assert found.relative_steps == {"4": 1.0, "3": pytest.approx(1.2)}
    even = workload(nodes=4).relative_step
    assert found.relative_step(4, even) == 1
    assert found.relative_step(3, even) == pytest.approx(1.2)
    # Sizes that were not measured: the same batch, from the nearest one that was.
    assert found.relative_step(2, even) == pytest.approx(1.2 * 3 / 2)
    assert found.relative_step(8, even) == pytest.approx(1 / 2)
    # The first step is a step like others: 4.1 s and 3.1 s, less 1.1 s.
    assert found.recovery_seconds == pytest.approx(3.0)
    assert found.join_seconds == pytest.approx(2.0)
    assert found.our_save == SaveCost(stall_seconds=0.3, persist_seconds=pytest.approx(3.7))
    path = tmp_path / "calibration.json"
    write_costs(found, path)
    assert read_costs(path) == found


def test_what_a_run_did_not_do_keeps_its_default(tmp_path):
    found = costs_of_run(a_run(tmp_path, nodes=(4,), saves=()))
    assert found.relative_steps == {"4": 1.0}
    assert (found.recovery_seconds, found.our_save) == (Costs().recovery_seconds, Costs().our_save)
    own = Policy(parse_system("ours"), workload(), found)
    assert own.step_seconds(4) == pytest.approx(1.0)
    assert own.step_seconds(3) == pytest.approx(4 / 3)


def test_nodes_of_a_run_may_have_several_ranks(tmp_path):
    assert costs_of_run(a_run(tmp_path, nodes=(4,)), 2).relative_steps == {"2": 1.0}
    with pytest.raises(ConfigError, match="4 ranks is no whole number of nodes with 3") as raised:
        costs_of_run(tmp_path, 3)
    assert str(raised.value).startswith(str(tmp_path))


def test_runs_that_calibrate_nothing(tmp_path):
    with pytest.raises(TelemetryError, match=r"holds no events\.jsonl"):
        costs_of_run(tmp_path)
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", world_size=4)
    with pytest.raises(ConfigError, match="let it train for longer"):
        costs_of_run(tmp_path)
