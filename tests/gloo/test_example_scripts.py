"""The scripts of examples/: what a laptop can train is trained, the rest is valid flags."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from megatron_resilient.checkpoint.directory import manifests
from megatron_resilient.telemetry import read_events
from tests.support.docs_commands import shown_commands

ROOT = Path(__file__).parents[2]
MODELS = ("mixtral", "deepseek", "qwen")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {"SMALL": "1"}

# What the papers and the published configurations say of the models.
PUBLISHED = {
    "mixtral": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 14336,
        "moe_shared_expert_intermediate_size": None,
    },
    "deepseek": {
        "num_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_layer_freq": [0] * 3 + [1] * 58,
    },
    "qwen": {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "qk_layernorm": True,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_shared_expert_intermediate_size": None,
    },
}
# A model of a tokenizer, and fusions of Transformer Engine, are not on every machine.
HERE = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "32000", "--no-rope-fusion")

# As the command line of one rank of an elastic run goes, but for the seat, which is given here.
# Without a GPU it is told that there is one, as on the nodes that the flags are for.
VALIDATE = """
import json, os, sys
import torch
torch.cuda.get_device_capability = lambda: (9, 0)
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training import arguments, global_vars
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron_resilient.mcore import elastic_arguments
from megatron_resilient.mcore.arguments import parse_and_validate
# Parsing is the same with it, and takes a fraction of the time.
from megatron.training.argument_utils import ArgumentGroupFactory as Factory
from megatron_resilient.patches.training_argument_utils import PATCHES
Factory._get_field_docstrings = PATCHES[0].make(Factory._get_field_docstrings)
os.environ["MEGATRON_RESILIENT_COORDINATOR"] = "host:29400"
elastic_arguments.join_world = lambda args: None
for model, names, worlds, flags in json.load(open(sys.argv[1])):
    for world in worlds:
        os.environ.update(WORLD_SIZE=str(world), RANK="0")
        sys.argv[1:] = flags
        args = parse_and_validate(arguments.parse_and_validate_args)
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        global_vars.destroy_global_vars()
        destroy_num_microbatches_calculator()
        said = {name: getattr(args, name) for name in names}
        slots = args.resilient_slots_per_rank * args.expert_model_parallel_size
        print("VALID", json.dumps([model, world, slots, said]))
"""


def programs(folder, called):
    """Puts a `megatron-resilient` into `folder` that writes down how it was called."""
    folder.mkdir()
    program = folder / "megatron-resilient"
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >> {called}\nprintf '\\n' >> {called}\n")
    program.chmod(0o755)
    return folder


def script(model, *arguments, path, **variables):
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        [ROOT / f"examples/models/{model}_like.sh", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def full_size(tmp_path):
    """Returns what the script of a model starts on a node of a cluster: the argument list."""
    for name in ("corpus.bin", "corpus.idx", "tokenizer.model"):
        (tmp_path / name).touch()

    def full_size(model, **changes):
        called = tmp_path / f"{model}.calls"
        inputs = {
            "COORDINATOR": "head:29400",
            "NNODES": "2:4",
            "DATA_PREFIX": str(tmp_path / "corpus"),
            "TOKENIZER": str(tmp_path / "tokenizer.model"),
        }
        done = script(
            model,
            *(str(tmp_path / "run"), "--seed", "7"),
            path=programs(tmp_path / f"bin-{model}", called),
            **{**inputs, **changes, "SMALL": ""},
        )
        if done.returncode:
            return done
        (line,) = called.read_text().splitlines()
        return line.split("\0")[:-1]

    return full_size


def test_a_node_is_started_with_its_flags(full_size):
    command = full_size("mixtral")
    assert command[:7] == [
        *("run", "--coordinator", "head:29400", "--nnodes", "2:4", "--nproc-per-node", "8")
    ]
    assert Path(command[7]).resolve() == ROOT / "examples/pretrain_moe.py"
    assert command[-2:] == ["--seed", "7"]


@pytest.mark.parametrize("missing", ["COORDINATOR", "NNODES", "DATA_PREFIX", "TOKENIZER"])
def test_a_missing_input_is_named(full_size, missing):
    done = full_size("qwen", **{missing: ""})
    assert done.returncode == 1
    assert missing in done.stderr


@pytest.mark.slow
def test_full_sizes_are_what_megatron_and_we_accept(full_size, tmp_path):
    """On all nodes and on the fewest, by every check that comes before anything is built."""
    cases = []
    for model, published in PUBLISHED.items():
        text = (ROOT / f"examples/models/{model}_like.sh").read_text()
        fewest, most = map(int, re.search(r"For (\d+) to (\d+) nodes of 8 GPUs", text).groups())
        flags = [*full_size(model)[8:], *HERE]
        cases.append((model, list(published), [8 * most, 8 * fewest], flags))
    for launched in (manifest_for_kubernetes(tmp_path), job_for_slurm(tmp_path)):
        cases.append(("mixtral", list(PUBLISHED["mixtral"]), *launched))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VALIDATE, tmp_path / "cases.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    valid = [json.loads(line[6:]) for line in done.stdout.splitlines() if line[:5] == "VALID"]
    assert [(model, world) for model, world, *_ in valid] == [
        (model, world) for model, _, worlds, _ in cases for world in worlds
    ]
    for number, (model, _, slots, said) in enumerate(valid):
        assert said == PUBLISHED[model]
        # On all nodes every expert has two replicas, and on the fewest still one.
        assert slots >= said["num_experts"] * (1 if number % 2 else 2)


def manifest_for_kubernetes(folder):
    """Returns the most and the fewest ranks of examples/kubernetes, and its flags."""
    text = (ROOT / "examples/kubernetes/pretrain_moe.yaml").read_text()
    (nodes,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet")
    command = nodes["spec"]["template"]["spec"]["containers"][0]["command"]
    options = dict(pairwise(command))
    ranks = [int(n) * int(options["--nproc-per-node"]) for n in options["--nnodes"].split(":")]
    flags = command[command.index("/opt/megatron-resilient/examples/pretrain_moe.py") + 1 :]
    local = ("--data-path", str(folder / "corpus"), "--tokenizer-model", str(folder / "corpus.bin"))
    return ranks[::-1], [*flags, *local, *HERE]


def job_for_slurm(folder):
    """Returns the same of examples/slurm, as docs/operations.md has it submitted."""
    (command,) = (
        shown.text
        for shown in shown_commands(ROOT / "docs/operations.md")
        if "sbatch --no-kill" in shown.text
    )
    words = shlex.split(command)
    start = words.index("sbatch")
    asked = dict(word.split("=", 1) for word in words[:start])
    nodes = words[words.index("--nodes") + 1]
    called = folder / "slurm.calls"
    programs(folder / "bin-slurm", called).joinpath("megatron-resilient").rename(
        folder / "bin-slurm" / "srun"
    )
    scontrol = folder / "bin-slurm" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho head\n")
    scontrol.chmod(0o755)
    done = subprocess.run(
        ["bash", *words[words.index("examples/slurm/pretrain_moe.sbatch") :]],
        env={
            **os.environ,
            **asked,
            "PATH": f"{folder / 'bin-slurm'}:{os.environ['PATH']}",
            "DATA_PREFIX": str(folder / "corpus"),
            "TOKENIZER": str(folder / "tokenizer.model"),
            "RUN_DIR": str(folder / "slurm"),
            "SLURM_JOB_NODELIST": "head",
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(ROOT),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = [line.split("\0")[:-1] for line in called.read_text().splitlines()]
    (train,) = (call for call in calls if "run" in call)
    assert f"{asked['MIN_NODES']}:{nodes}" in train
    flags = train[train.index(str(ROOT / "examples/pretrain_moe.py")) + 1 :]
    return [8 * int(nodes), 8 * int(asked["MIN_NODES"])], [*flags, *HERE]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_small_size_trains(model, tmp_path):
    """The script as it stands: four nodes, saves by expert, replicas, and a report at the end.

    The first one with the fault of the README.
    """
    run = tmp_path / "run"
    fault = ("--resilient-fault", "kill-node node=2 step=12") if model == MODELS[0] else ()
    assert not fault or f'_like.sh runs/first {fault[0]} "{fault[1]}"' in README
    done = script(model, str(run), *fault, path=Path(sys.executable).parent, **SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    if fault:
        (shown,) = re.findall(r"^```\n(generation 1 .+?)^```", README, re.MULTILINE | re.DOTALL)
        said = (done.stdout + done.stderr).replace(str(run), "runs/first")
        for line in shown.splitlines():
            # How a loss is noticed first, and how often things are counted, is chance.
            stable = re.sub(r"\d+ events, |: its connections broke", "", line)
            assert stable in re.sub(r"\d+ events, ", "", said), said
    events = read_events(run)
    losses = {
        event["step"]: event["loss"]["lm loss"] for event in events if event["event"] == "step"
    }
    assert sorted(losses) == list(range(1, 31))
    assert losses[30] < losses[1] - 0.5, losses
    start = next(event for event in events if event["event"] == "run_start")
    assert start["ep"] == start["world_size"] == 4
    recoveries = [event for event in events if event["event"] == "recovery"]
    assert len(recoveries) >= len(fault) // 2
    assert all(event["lost_steps"] == 0 for event in recoveries)
    assert "node2" in recoveries[0]["lost_nodes"] if fault else not recoveries
    placements = [event["slots"] for event in events if event["event"] == "placement"]
    (experts,) = {len({one for rank in slots for one in rank}) for slots in placements}
    assert sum(map(len, placements[0])) > experts  # replicas
    assert manifests(run / "checkpoints")[0] == 30
    assert (run / "report.html").stat().st_size > 10_000
    assert "report.html: " in done.stdout
    # What the ranks say is in files: a reader of the README finds the loss there.
    logs = [path.read_text() for path in (run / "logs").rglob("*.log")]
    assert any("lm loss" in log for log in logs)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_quickstart_trains_on_ones_own_text(tmp_path):
    """Data, a tokenizer, training and a report; the flags behind the folders win."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    for page in sorted((ROOT / "docs").glob("*.md")):
        for number, part in enumerate(page.read_text().split("\n## ")):
            (text / f"{page.stem}-{number}.txt").write_text(part)
    # torch's own script; an environment that borrows its packages has them without their programs.
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    done = subprocess.run(
        [
            *(ROOT / "examples/quickstart.sh", text, run, "--train-iters", "4"),
            *("--num-layers", "2", "--seq-length", "64", "--eval-iters", "1"),
        ],
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RANKS": "2",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [event["step"] for event in read_events(run) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert (run / "data" / "text.idx").exists()
    assert (run / "report.html").stat().st_size > 10_000
