"""The Slurm script, run with stand-ins for srun and scontrol that write down what was asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/pretrain_moe.sbatch"
INPUTS = {"DATA_PREFIX": "/data/corpus", "TOKENIZER": "/models/t.model"}
WORLD_SIZE = 32


@pytest.fixture
def submit(tmp_path):
    """Runs the script as Slurm would on four nodes; returns the argument lists given to srun."""
    tools, log = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    for name, body in {
        "srun": f"printf '%s\\0' \"$@\" >> {log}; printf '\\n' >> {log}",
        "scontrol": "printf 'node-a\\nnode-b\\n'",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)

    def submit(*flags: str, **variables: str) -> list[list[str]]:
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_JOB_ID": "7",
            "SLURM_SUBMIT_DIR": str(ROOT),
            **variables,
        }
        subprocess.run(
            ["bash", SCRIPT, *flags], env=environment, check=True, capture_output=True, text=True
        )
        return [line.split("\0")[:-1] for line in log.read_text().splitlines()]

    return submit


def test_each_node_is_checked_then_starts_one_torchrun(submit, tmp_path):
    doctor, train = submit("--lr", "1e-3", **INPUTS, RUN_DIR=str(tmp_path / "run"))
    assert doctor[-2:] == ["megatron-resilient", "doctor"]
    assert "--ntasks-per-node=1" in train
    launcher = train[train.index("torchrun") :]
    assert {"--nnodes=4", "--nproc-per-node=8", "--rdzv-endpoint=node-a:29500"} < set(launcher)
    assert str(ROOT / "examples/pretrain_moe.py") in launcher
    assert launcher[-2:] == ["--lr", "1e-3"]
    assert (tmp_path / "run").is_dir()


def test_in_a_container_it_sees_its_data_and_its_own_copy_of_the_script(submit, tmp_path):
    run_dir = str(tmp_path / "run")
    for call in submit(**INPUTS, RUN_DIR=run_dir, CONTAINER_IMAGE="plugin.sqsh"):
        assert "--container-image=plugin.sqsh" in call
        assert f"--container-mounts=/data:/data:ro,/models:/models:ro,{run_dir}:{run_dir}" in call
    assert "/opt/megatron-resilient/examples/pretrain_moe.py" in call


@pytest.mark.parametrize("missing", ["DATA_PREFIX", "TOKENIZER", "RUN_DIR"])
def test_a_missing_input_is_named(submit, tmp_path, missing):
    variables = {**INPUTS, "RUN_DIR": str(tmp_path / "run")}
    del variables[missing]
    with pytest.raises(subprocess.CalledProcessError) as error:
        submit(**variables)
    assert missing in error.value.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_megatron_accepts_its_flags(submit, tmp_path):
    *_, train = submit(**INPUTS, RUN_DIR=str(tmp_path / "run"))
    flags = train[train.index(str(ROOT / "examples/pretrain_moe.py")) + 1 :]
    code = (
        "import torch\n"
        "torch.cuda.get_device_capability = lambda: (9, 0)  # as on the nodes it is for\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "from megatron_resilient.config import add_flags\n"
        "args = parse_args(lambda parser: add_flags(parser) or parser)\n"
        "validate_args(args)\n"
        "print('data parallel', args.data_parallel_size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *flags],
        env={**os.environ, "WORLD_SIZE": str(WORLD_SIZE), "RANK": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "data parallel 8" in done.stdout
