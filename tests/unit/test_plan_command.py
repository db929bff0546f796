import json
import subprocess
import sys

import numpy as np
import pytest

from megatron_resilient import cli
from megatron_resilient.algorithms.plan_files import read_loads
from megatron_resilient.telemetry import EventLog
from tests.support import planning_oracles as oracles

LOADS = [[40, 10, 30, 20], [1, 1, 1, 97]]


@pytest.fixture
def loads_file(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"layers": LOADS}))
    return path


def topology_file(tmp_path, **changes):
    document = {
        "nodes": [
            {"id": f"n{i}", "rack": "ab"[i % 2], "failure_probability": 0.01 * (i + 1)}
            for i in range(5)
        ],
        "racks": [
            {"id": "a", "failure_probability": 0.05},
            {"id": "b", "failure_probability": 0.001},
        ],
        **changes,
    }
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(document))
    return path


def plan(loads_file, *flags, nodes=5, slots=3, minimum=2):
    return cli.main(
        [
            "plan",
            "--loads",
            str(loads_file),
            "--nodes",
            str(nodes),
            "--slots-per-node",
            str(slots),
            "--min-replicas",
            str(minimum),
            *flags,
        ]
    )


def test_json(loads_file, capsys):
    assert plan(loads_file, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {key: document[key] for key in ("nodes", "slots_per_node", "min_replicas")} == {
        "nodes": 5,
        "slots_per_node": 3,
        "min_replicas": 2,
    }
    assert document["effective_min_replicas"] == 2
    assert document["survival_probability"] is None
    assert document["seconds"] > 0
    joint = document["joint_recovery_probability"]
    assert list(joint) == ["1", "2", "3", "4", "5"]
    for layer, loads in zip(document["layers"], LOADS, strict=True):
        slots = np.array(layer["nodes"])
        assert slots.shape == (5, 3)
        assert np.bincount(slots.ravel()).tolist() == layer["replicas"]
        assert layer["distinct_nodes"] == [
            int((slots == expert).any(axis=1).sum()) for expert in range(4)
        ]
        per_slot = np.array(loads) / layer["replicas"]
        assert layer["imbalance"] == pytest.approx(per_slot.max() * 15 / sum(loads))
        for losses, value in layer["recovery_probability"].items():
            assert value == pytest.approx(oracles.recovery_by_enumeration(slots, 4, int(losses)))
            assert joint[losses] <= value + 1e-12
        assert layer["optimal"] in (True, False, None)
        assert isinstance(layer["method"], str)
    assert document["guaranteed_losses"] == max(int(k) for k, p in joint.items() if p == 1)


def test_topology(loads_file, tmp_path, capsys):
    path = topology_file(tmp_path)
    assert plan(loads_file, "--json", "--topology", str(path)) == 0
    document = json.loads(capsys.readouterr().out)
    probability = oracles.loss_probability(
        [0.01 * (i + 1) for i in range(5)], [i % 2 for i in range(5)], [0.05, 0.001]
    )
    survives = [
        not any(
            oracles.is_fatal(layer["nodes"], 4, [n for n in range(5) if lost >> n & 1])
            for layer in document["layers"]
        )
        for lost in range(32)
    ]
    assert document["survival_probability"] == pytest.approx(probability @ survives)


def test_fewer_replicas_than_asked_for_are_said(loads_file, capsys):
    assert plan(loads_file, minimum=4) == 0
    assert "At least 3 replicas of every expert, not 4" in capsys.readouterr().out


def test_report_for_people(loads_file, tmp_path, capsys):
    assert plan(loads_file, "--topology", str(topology_file(tmp_path)), "--layer", "1") == 0
    text = capsys.readouterr().out
    assert "5 nodes of 3 slots" in text
    assert "may be lost at once" in text
    assert "Survival of the topology's failures: 0.9" in text
    assert "Layer 1: the experts on every node" in text
    assert "node 0" in text or "nodes 0-" in text


def test_sampled_probabilities_carry_an_error(loads_file, capsys, monkeypatch):
    from megatron_resilient.algorithms import loss_sweep

    monkeypatch.setattr(loss_sweep, "count_survivable", lambda *_: None)
    assert plan(loads_file, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["joint_recovery_probability_error"]["2"] > 0
    assert plan(loads_file) == 0
    assert "±" in capsys.readouterr().out


def test_experts_that_do_not_fit_are_the_answer_no(loads_file, capsys):
    assert plan(loads_file, "--json", nodes=1) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["layers"] == []
    assert document["effective_min_replicas"] == 0
    assert "layer 0: 4 experts do not fit into 3 slots" in document["error"]
    assert document["error"] in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected"),
        ('{"layers": []}', "expected"),
        ('{"layers": [[]]}', r"layers\[0\] must be a list"),
        ('{"layers": [[1], [1, -2]]}', r"layers\[1\]\[1\] is -2"),
        ('{"layers": [[1, true]]}', r"layers\[0\]\[1\] is true"),
        ('{"layers": [[NaN]]}', r"layers\[0\]\[0\] is NaN"),
        ('{"layers": [[1, 1e300]]}', r"layers\[0\]\[1\] is 1e.300"),
        (f'{{"layers": [[{10**400}]]}}', r"layers\[0\]\[0\] is 1000"),
        ('{"layers": [[6e17, 6e17]]}', r"layers\[0\] has 1.2e.18 tokens"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "no text in UTF-8, from byte 0"),
    ],
)
def test_loads_that_cannot_be_read(tmp_path, capsys, text, message):
    path = tmp_path / "loads.json"
    path.write_text(text, errors="surrogateescape")
    assert plan(path, "--json") == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith(f"megatron-resilient plan: {path}: ")
    with pytest.raises(Exception, match=message):
        cli.main(["plan", "--debug", "--loads", str(path), "--nodes", "1", "--slots-per-node", "1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": [{"id": 1}]}, "nodes[0].failure_probability is null"),
        ({"nodes": [{"id": 1, "failure_probability": 2}]}, "failure_probability is 2"),
        ({"nodes": [{"failure_probability": 0}]}, "nodes[0] must be an object with an id"),
        ({"racks": [{"id": "a", "failure_probability": 0}]}, 'nodes[1].rack is "b"'),
        ({"nodes": []}, "expected"),
        ({"racks": {}}, "racks must be a list"),
        ({"nodes": [{"id": 1, "failure_probability": 0}] * 2}, "nodes[1].id is 1 once more"),
        ({"nodes": [{"id": 1, "failure_probability": 0}]}, "describes 1 nodes, the plan has 5"),
    ],
)
def test_topologies_that_cannot_be_read(loads_file, tmp_path, capsys, changes, message):
    path = topology_file(tmp_path, **changes)
    assert plan(loads_file, "--topology", str(path)) == 2
    assert message in capsys.readouterr().err


def test_loads_of_a_run(tmp_path, capsys):
    """What it counted in the later half of its steps; what was done again counts once."""
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", world_size=2)
        assert plan(tmp_path) == 2
        assert "has counted no loads yet" in capsys.readouterr().err
        for step, tokens in ((10, [9, 9]), (20, [1, 5]), (30, [7, 7]), (30, [2, 6])):
            for layer in (4, 3):
                rows = {"tokens": [count * layer for count in tokens], "steps": 10}
                log.emit("expert_load", step, layer=layer, **rows)
    assert read_loads(tmp_path) == [[9, 33], [12, 44]]
    assert plan(tmp_path) == 0
    assert "5 nodes of 3 slots" in capsys.readouterr().out
    with EventLog(tmp_path, rank=0) as log:
        log.emit("expert_load", 40, layer=3, tokens=[1, 2, 3], steps=10)
    assert plan(tmp_path) == 2
    assert "layer 3 has not always had as many experts" in capsys.readouterr().err
    assert plan(tmp_path / "absent") == 2
    (tmp_path / "empty").mkdir()
    assert plan(tmp_path / "empty") == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_missing_file_and_wrong_flags(loads_file, tmp_path, capsys):
    assert plan(tmp_path / "absent.json") == 2
    assert "absent.json" in capsys.readouterr().err
    for wrong in (0, "x", 100_000_000):
        with pytest.raises(SystemExit) as stopped:
            plan(loads_file, nodes=wrong)
        assert stopped.value.code == 2
    capsys.readouterr()
    assert plan(loads_file, "--layer", str(len(LOADS))) == 2
    assert f"has layers 0 to {len(LOADS) - 1}" in capsys.readouterr().err
    assert plan(loads_file, nodes=1_000_000, slots=1_000_000) == 2
    assert "more than 10,000,000" in capsys.readouterr().err


def test_neither_torch_nor_megatron_is_imported(loads_file):
    code = (
        "import sys; from megatron_resilient.cli import main; "
        f"main(['plan', '--loads', {str(loads_file)!r}, '--nodes', '4', '--slots-per-node', '3']); "
        "sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
