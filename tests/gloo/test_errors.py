"""Bad input: one clear line, a status that is not 0, and nothing overwritten."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pretrain_pool import TINY, flags, free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_moe.py"
MODEL = TINY | {"expert_model_parallel_size": 2, "train_iters": 2, "save_interval": 1}
REFUSED = "the checkpoint cannot be loaded into this model: "
HIDDEN = "--hidden-size is 64 there, 128 here"


def contents(folder: Path) -> dict[str, str]:
    """Returns a hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def lines_of_ours(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("pretrain_moe.py: ")]


@pytest.fixture(scope="module")
def checkpoints(pools, tmp_path_factory):
    """Two checkpoints of the small model; nothing may change them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pools.plugin.run(2, **MODEL, save=folder).ok()
    before = contents(folder)
    assert sum("iter_0000002" in name for name in before) > 2
    yield folder
    assert contents(folder) == before


WRONG_USAGE = {
    "unknown flag": ({"no_such_flag": True}, "unrecognized arguments: --no-such-flag"),
    "unknown value": (
        {"moe_token_dispatcher_type": "pigeon"},
        "argument --moe-token-dispatcher-type: invalid choice: 'pigeon'",
    ),
    "not a number": ({"num_layers": "many"}, "argument --num-layers: invalid int value: 'many'"),
    "ours out of range": (
        {"resilient_expert_load_interval": -1},
        "--resilient-expert-load-interval -1: must be at least 0",
    ),
    "TP 3 on 2 ranks": (
        {"tensor_model_parallel_size": 3},
        "2 ranks cannot hold TP 3 x PP 1 x CP 1: start a multiple of 3 ranks",
    ),
    "experts that EP does not divide": (
        {"num_experts": 3},
        "Number of experts should be a multiple of expert model parallel_size",
    ),
    "heads that do not divide": (
        {"num_attention_heads": 3},
        "assert args.hidden_size % args.num_attention_heads == 0",
    ),
    "experts with TP alone": (
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 1},
        "--sequence-parallel is missing",
    ),
    "missing data": (
        {"mock_data": False, "data_path": "/no/such/corpus"},
        "--data-path /no/such/corpus: there is no /no/such/corpus.bin",
    ),
    "missing tokenizer": (
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/no/such/t.model"},
        "--tokenizer-model /no/such/t.model: no such file",
    ),
    "missing tokenizer here": (
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "t.model"},
        "Megatron refuses these flags: tokenizer_path: t.model is invalid",
    ),
    "Transformer Engine on a CPU": (
        {"transformer_impl": "transformer_engine"},
        "--transformer-impl transformer_engine: not on the CPU backend",
    ),
    "NCCL on a CPU": (
        {"distributed_backend": "nccl"},
        "--distributed-backend nccl: not on the CPU backend",
    ),
    "no eval interval": ({"eval_interval": None}, "--eval-interval is missing"),
    "no save interval": ({"save_interval": None}, "--save-interval is missing"),
}


@pytest.mark.parametrize("name", WRONG_USAGE)
def test_wrong_usage(pools, tmp_path, name):
    changes, message = WRONG_USAGE[name]
    folder = tmp_path / "run"
    result = pools.plugin.run(2, **(MODEL | {"save": folder} | changes), as_script=True)
    assert result.exits == [2, 2], (result.error, result.outputs)
    assert result.losses == []
    (line,) = lines_of_ours("\n".join(result.outputs))
    assert line.startswith("pretrain_moe.py: ConfigError: ")
    assert message in line
    assert "Traceback" not in "\n".join(result.outputs)
    assert not folder.exists()


OTHER_MODELS = {
    "hidden size": ({"hidden_size": 128}, HIDDEN),
    "layers": ({"num_layers": 4}, "--num-layers is 2 there, 4 here"),
    "heads": ({"num_attention_heads": 2}, "--num-attention-heads is 4 there, 2 here"),
    "experts": ({"num_experts": 16}, "--num-experts is 8 there, 16 here"),
    "expert size": ({"moe_ffn_hidden_size": 32}, "--moe-ffn-hidden-size is 128 there, 32 here"),
    "activation": ({"swiglu": False}, "--swiglu is True there, False here"),
    "norm": ({"normalization": "LayerNorm"}, "--normalization is RMSNorm there, LayerNorm here"),
    "precision": ({"bf16": True}, "--bf16 is False there, True here"),
    "two": (
        {"num_layers": 4, "hidden_size": 128},
        "--num-layers is 2 there, 4 here; --hidden-size is 64 there, 128 here",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_checkpoint_of_another_model(pools, checkpoints, name):
    changes, message = OTHER_MODELS[name]
    run = MODEL | {"load": checkpoints, "save": checkpoints} | changes
    assert_refused(pools.plugin.run(2, **run, as_script=True), checkpoints, REFUSED + message)


def assert_refused(result, folder, message):
    assert result.exits == [1, 1], (result.error, result.outputs)
    assert result.losses == []
    for rank, output in enumerate(result.outputs):
        (line,) = lines_of_ours(output)
        start = f"pretrain_moe.py: rank {rank}: CheckpointError: --load {folder}: "
        assert line.startswith(start), line
        assert message in line
        assert "Traceback" not in output


def test_longer_schedule_says_which_flag_allows_it(pools, checkpoints):
    run = MODEL | {"load": checkpoints, "train_iters": 5}
    message = "--override-opt-param-scheduler takes what the command line says"
    assert_refused(pools.plugin.run(2, **run, as_script=True), checkpoints, message)


def test_damaged_checkpoint(pools, checkpoints, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(checkpoints, folder)
    shard = max((folder / "iter_0000002").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    before = contents(folder)
    run = MODEL | {"load": folder, "save": folder}
    assert_refused(pools.plugin.run(2, **run, as_script=True), folder, REFUSED)
    assert contents(folder) == before


def environment(**changes: str) -> dict[str, str]:
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | own | changes


def torchrun(tmp_path: Path, argv: list[str]) -> tuple[int, list[str]]:
    """Runs the example on two ranks; returns torchrun's status and each rank's stderr."""
    logs = tmp_path / "logs"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "--redirects", "3", "--log-dir", str(logs)]
    done = subprocess.run(
        [*launcher, SCRIPT, *argv],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        timeout=180,
    )
    texts = [next(logs.glob(f"**/{rank}/stderr.log")).read_text() for rank in range(2)]
    return done.returncode, texts


def test_wrong_usage_under_torchrun(tmp_path):
    status, texts = torchrun(tmp_path, flags(**MODEL, tensor_model_parallel_size=3, save="run"))
    assert status != 0
    assert len(lines_of_ours("\n".join(texts))) == 1
    assert "2 ranks cannot hold TP 3" in texts[0]
    assert "Traceback" not in "".join(texts)
    assert not (tmp_path / "run").exists()


def test_checkpoint_of_another_model_under_torchrun(tmp_path, checkpoints):
    run = MODEL | {"hidden_size": 128, "load": checkpoints, "save": checkpoints}
    status, texts = torchrun(tmp_path, flags(**run))
    assert status != 0
    # The launcher may end the second rank before it speaks.
    said = lines_of_ours("\n".join(texts))
    assert said
    assert all(HIDDEN in line for line in said)
    assert "Traceback" not in "".join(texts)


def run_script(tmp_path: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *argv],
        cwd=tmp_path,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_megatron_that_drifted(tmp_path):
    (installed,) = importlib.util.find_spec("megatron").submodule_search_locations
    shutil.copytree(
        installed,
        tmp_path / "megatron",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    file = tmp_path / "megatron" / "training" / "checkpointing.py"
    text = file.read_text()
    assert text.count("def get_rng_state(") == 1
    file.write_text(text.replace("'np_rng_state': np", "'numpy_rng_state': np"))
    done = run_script(tmp_path, *flags(**MODEL, save="run"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    first, second, *rest = [
        line for line in done.stderr.splitlines() if "cpp_extension" not in line
    ]
    assert first == (
        "pretrain_moe.py: rank 0: PatchDriftError: upstream code is not the code that was locked; "
        "nothing was patched"
    )
    assert second.startswith("fixes.expert-rng (megatron.training.checkpointing:get_rng_state): ")
    assert "+         'numpy_rng_state': np.random.get_state()," in rest
    assert "megatron-resilient patches lock" in rest[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_device_that_is_not_there(tmp_path):
    done = run_script(tmp_path, "--resilient-device", "cuda")
    assert done.returncode == 2
    (line,) = lines_of_ours(done.stderr)
    assert "--resilient-device cuda: torch sees no CUDA device here" in line
    assert "Traceback" not in done.stderr
