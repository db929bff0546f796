"""`megatron-resilient simulate`; the commands of its page: test_documented_commands.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_resilient import cli
from megatron_resilient.simulation.costs import Costs
from megatron_resilient.telemetry import EventLog

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")

QUICK = ("--mtbf", "30", "--hours", "4", "--nodes", "8", "--experts", "8")


def simulate(*flags):
    return cli.main(["simulate", *flags])


def document(capsys, *flags):
    assert simulate(*flags, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys):
    found = document(capsys, *QUICK, "--price", "2", "--seed", "3")
    assert found["simulated"] is True
    assert "nothing was run" in found["note"]
    assert found["trace"]["hours"] == 4
    assert found["costs"] == Costs().to_plain()
    names = [own["system"] for own in found["systems"]]
    assert names[:2] == ["restart", "in-process"]
    assert names[-1] == "ours+pec+overlap"
    for own in found["systems"]:
        assert sum(own["seconds"].values()) == pytest.approx(4 * 3600)
        assert own["ettr"] == pytest.approx(own["seconds"]["productive"] / 4 / 3600)
        assert own["cost"] == pytest.approx(2 * found["trace"]["node_hours"])
        each = own["cost"] / own["steps"] * 1000
        assert own["cost_per_1000_steps"] == pytest.approx(each)
        assert own["settings"]["save_interval"] >= 1
    assert found["recommendation"] is None
    again = document(capsys, *QUICK, "--price", "2", "--seed", "3")
    again["seconds"] = found["seconds"]
    assert again == found
    other = document(capsys, *QUICK, "--seed", "4")
    assert other["systems"] != found["systems"]


def test_flags_reach_what_they_are_for(capsys):
    one = document(capsys, *QUICK, "--system", "ours", "--save-interval", "9", "--no-repair")
    assert one["systems"][0]["settings"]["save_interval"] == 9
    assert one["trace"]["nodes_joined"] == 0
    two = document(
        capsys,
        *QUICK,
        *("--system", "ours+pec", "--checkpoint-experts", "2", "--nodes-per-failure", "2"),
        *("--step-seconds", "3", "--slots-per-node", "4", "--min-replicas", "3"),
        *("--repair", "0", "--zipf", "0", "--moe-layers", "12", "--expert-mib", "100"),
    )
    (own,) = two["systems"]
    assert own["settings"]["checkpoint_experts"] == 2
    assert own["settings"]["slots_per_node"] == 4
    assert own["settings"]["min_replicas"] == 3
    assert two["trace"]["nodes_joined"] == two["trace"]["nodes_lost"]
    assert two["costs"]["step_seconds"] == 3
    assert two["workload"]["checkpoint_bytes"] == pytest.approx((12 * 8 * 100 + 15) * 2**20)


def test_a_trace_is_cut_and_capped(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(
        "seconds,event,node\n"
        + "".join(f"0,add,n{i}\n" for i in range(6))
        + "3600,remove,n0\n7200,leave,n1\n"
    )
    whole = document(capsys, "--trace", str(path), "--experts", "8", "--system", "ours")
    assert whole["trace"]["hours"] == 2
    assert whole["workload"]["nodes"] == 6
    part = document(
        capsys,
        *("--trace", str(path), "--experts", "8", "--system", "ours", "--nodes", "5"),
        *("--start-minute", "30", "--hours", "3"),
    )
    assert part["trace"]["most_nodes"] == 5
    assert part["trace"]["nodes_lost"] == 1  # a spare takes its place
    assert part["trace"]["nodes_joined"] == 1
    assert part["trace"]["nodes_left"] == 1
    assert part["trace"]["node_hours"] == pytest.approx(1.5 * 5 + 1.5 * 4)


def test_loads_and_schedules_are_read(tmp_path, capsys):
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"layers": [[40, 10, 30, 20]]}))
    cost = {"alpha_ms": 0.1, "beta_ms_per_byte": 1e-7}
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            dict.fromkeys(("a2a", "allgather", "reducescatter", "allreduce"), cost)
            | {"gemm": {"alpha_ms": 0.1, "beta_ms_per_flop": 1e-11}}
        )
    )
    layers = tmp_path / "layers.json"
    layer = dict.fromkeys(("a2a_bytes", "allgather_bytes", "reducescatter_bytes"), 6e7)
    layers.write_text(json.dumps({"max_degree": 8, "layers": [layer | {"expert_flops": 4e11}]}))
    common = ("--mtbf", "30", "--hours", "1", "--loads", str(loads), "--system", "ours+overlap")
    found = document(capsys, *common, "--profile", str(profile), "--layers", str(layers))
    assert found["workload"]["experts"] == 4
    assert found["costs"]["overlap_speedup"] > 1.5
    assert simulate(*common, "--profile", str(profile)) == 2
    assert "--profile and --layers" in capsys.readouterr().err


def test_a_run_is_a_calibration(tmp_path, capsys):
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", world_size=8)
        for step in range(1, 9):
            log.emit("step", step, loss={"lm loss": 1.0}, tokens=8, seconds=0.5)
    found = document(capsys, *QUICK, "--system", "ours", "--calibration", str(tmp_path))
    assert found["costs"]["step_seconds"] == 0.5
    assert found["costs"]["source"] == f"the run in {tmp_path}"
    nodes = ("--mtbf", "60", "--nodes", "4", "--ranks-per-node", "2", "--experts", "8")
    found = document(capsys, *nodes, "--system", "ours", "--calibration", str(tmp_path))
    assert found["costs"]["relative_steps"] == {"4": 1.0}


def test_a_run_that_lost_no_node_does_not_make_losses_free(tmp_path, capsys):
    with EventLog(tmp_path, rank=0) as log:
        log.emit("run_start", world_size=8)
        for step in range(1, 9):
            log.emit("step", step, loss={"lm loss": 1.0}, tokens=8, seconds=0.5)
    common = ("--no-repair", "--hours", "4", "--nodes", "8", "--experts", "8", "--system", "ours")
    goodput = [
        document(capsys, *common, "--calibration", str(tmp_path), "--mtbf", minutes)["systems"][0]
        for minutes in ("1e6", "60", "30")
    ]
    assert [own["goodput"] for own in goodput] == sorted(
        (own["goodput"] for own in goodput), reverse=True
    )
    assert goodput[2]["goodput"] < 0.8


def test_tables_say_that_they_are_simulated(capsys):
    assert simulate(*QUICK, "--price", "1.5") == 0
    text = capsys.readouterr().out
    assert text.startswith("Simulated from measured costs; nothing was run.")
    assert re.search(r"^ours\+pec\+overlap +0\.\d+ +0\.\d+", text, re.MULTILINE)
    assert "per 1000 steps" in text


def test_a_recommendation(capsys):
    flags = (*QUICK, "--recommend", "--system", "ours", "--slots-per-node", "3")
    found = document(capsys, *flags)["recommendation"]
    assert found["guaranteed_losses"] >= 1
    assert 2 <= found["slots_per_node"] <= 3
    assert found["predicted"]["system"].startswith("ours")
    assert f"--save-interval {found['save_interval']}" in found["flags"]
    assert len(found["tried"]) >= 3
    assert simulate(*flags) == 0
    text = capsys.readouterr().out
    assert f"Proposed: {found['slots_per_node']} slots a node" in text
    assert found["flags"] in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mtbf", "30", "--system", "mine"), "system 'mine': use one of"),
        (("--mtbf", "30", "--nodes", "2", "--slots-per-node", "3"), "64 experts do not fit"),
        (("--mtbf", "30", "--min-nodes", "17"), "at least 17 of 16 nodes"),
        (("--trace", "absent.csv"), "absent.csv"),
        (("--mtbf", "30", "--calibration", "absent.json"), "absent.json"),
        (("--mtbf", "30", "--repair", "5", "--no-repair"), "--repair and --no-repair"),
        (("--trace", "x", "--repair", "5"), "--repair: --trace says that"),
        (("--mtbf", "5", "--loads", "x", "--experts", "8"), "--experts: --loads says that"),
        (("--mtbf", "1e-9", "--repair", "0"), "more than 1,000,000 events"),
        (("--mtbf", "5", "--ranks-per-node", "1000000"), "more than 10,000,000"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(flags, message, capsys):
    assert simulate(*flags) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("megatron-resilient simulate: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_traces_without_an_end_or_a_node(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("seconds,event,node\n0,add,a\n")
    assert simulate("--trace", str(path)) == 2
    assert "use --hours" in capsys.readouterr().err
    path.write_text("seconds,event,node\n50,add,a\n")
    assert simulate("--trace", str(path), "--hours", "0.01") == 2
    assert "there is never a node" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--mtbf", "0"),
        ("--mtbf", "nan"),
        ("--mtbf", "5", "--trace", "x"),
        ("--mtbf", "5", "--nodes", "0"),
        ("--mtbf", "5", "--nodes-per-failure", "0.5"),
        ("--mtbf", "5", "--hours", "inf"),
        ("--mtbf", "5", "--price", "-1"),
        ("--mtbf", "5", "--seed", "-1"),
        ("--mtbf", "5", "--nodes", "x"),
        ("--mtbf", "5", "--nodes", "100000000"),
        ("--mtbf", "5", "--expert-mib", "1e300"),
        ("--mtbf", "5", "--step-seconds", "1e-300"),
    ],
)
def test_wrong_usage(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        simulate(*flags)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: megatron-resilient simulate" in printed
    assert "invalid" not in printed  # argparse's own words name a function of ours


def test_neither_torch_nor_megatron_is_imported():
    code = (
        "import sys; from megatron_resilient.cli import main; "
        f"main(['simulate', *{QUICK!r}, '--recommend']); "
        "sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# The page.


def test_the_page_names_the_defaults():
    """The table of costs has every default, and nothing else."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    plain = Costs().to_plain()
    defaults = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            defaults |= {f"{name}.{part}": number for part, number in value.items()}
        elif name != "source":
            defaults[name] = value
    assert {name: float(value) for name, value in rows} == defaults
