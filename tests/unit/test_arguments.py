"""Command lines: our checks around Megatron's parser, here a parser of a few of its flags."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from megatron_resilient import plugin
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import arguments, cpu

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
BATCHES = (
    "global_batch_size",
    "micro_batch_size",
    "eval_global_batch_size",
    "eval_micro_batch_size",
)
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
TEXTS = ("tokenizer_type", "tokenizer_model", "save", "transformer_impl", "distributed_backend")


def parser_like_megatrons() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in LAYOUT:
        parser.add_argument(spelled(name), type=int, default=1)
    numbers = ("expert_tensor_parallel_size", "num_experts", "eval_interval", "save_interval")
    for name in (*numbers, *BATCHES):
        parser.add_argument(spelled(name), type=int)
    for name in PATHS:
        parser.add_argument(spelled(name), nargs="*")
    for name in TEXTS:
        parser.add_argument(spelled(name))
    for name in ("sequence_parallel", "full_validation", "skip_train", "async_save"):
        parser.add_argument(spelled(name), action="store_true")
    parser.add_argument("--decrease-batch-size-if-needed", action="store_true")
    parser.add_argument("--async-strategy", default="nvrx")
    parser.add_argument("--moe-grouped-gemm", action="store_true")
    parser.add_argument("--multi-latent-attention", action="store_true")
    parser.add_argument("--attention-backend")
    return parser


def spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def original(extra_args_provider=None, ignore_unknown_args=False, validate=lambda args: None):
    parser = extra_args_provider(parser_like_megatrons())
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    validate(args)
    return args


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A GPU machine of one rank, unless a test says otherwise."""
    monkeypatch.setattr(plugin, "on_cpu", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(plugin, "on_cpu", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # set by the backend, restored here
    backends = SimpleNamespace(AttnBackend=SimpleNamespace(unfused="unfused"))
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.enums", backends)


@pytest.fixture
def parse(monkeypatch):
    def parse(text, extra_args_provider=None, **options):
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *text.split()])
        return arguments.parse_and_validate(original, extra_args_provider, **options)

    return parse


def refused(parse, text, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


OK = "--eval-interval 10"


def test_our_flags_stand_beside_megatrons_and_the_users(parse):
    def provider(parser):
        assert parser.get_default("resilient_run_dir") is None  # ours are there already
        parser.add_argument("--color")
        return parser

    args = parse(f"{OK} --color red --resilient-expert-load-interval 3 --num-experts 4", provider)
    assert (args.color, args.resilient_expert_load_interval, args.num_experts) == ("red", 3, 4)


def test_options_reach_megatron(parse):
    args = parse(f"{OK} --nobody-knows-me", ignore_unknown_args=True)
    assert not hasattr(args, "nobody_knows_me")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{OK} --no-such-flag", "unrecognized arguments: --no-such-flag (--help lists all flags)"),
        (f"{OK} --num-experts many", "argument --num-experts: invalid int value: 'many'"),
        (f"{OK} --num-experts", "argument --num-experts: expected one argument"),
        (f"{OK} --resilient-device gpu", "argument --resilient-device: invalid choice: 'gpu'"),
        (f"{OK} --resilient-load-window -1", "--resilient-load-window -1: must be at least 0"),
        ("", "--eval-interval is missing"),
        (f"{OK} --save runs/a", "--save runs/a: --save-interval is missing"),
    ],
)
def test_wrong_usage_is_one_line(parse, text, message):
    assert message in refused(parse, text)


def test_help_ends_as_it_does_without_us(parse, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "--resilient-run-dir" in capsys.readouterr().out


def test_full_validation_needs_no_eval_interval(parse):
    assert parse("--full-validation").full_validation


def raising(error):
    def validate(args):
        raise error

    return validate


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AssertionError("heads do not divide\nhidden size"), "heads do not divide"),
        (ValueError("a value"), "a value"),
        (RuntimeError("a state"), "a state"),
        (KeyError("a key"), "KeyError: 'a key'"),
        (ImportError("a library should be installed"), "a library should be installed"),
        (FileNotFoundError(2, "No such file", "x.model"), "[Errno 2] No such file: 'x.model'"),
    ],
)
def test_what_megatron_refuses_is_one_line(parse, error, line):
    message = refused(parse, OK, validate=raising(error))
    assert message == f"Megatron refuses these flags: {line}"


def test_a_refusal_without_a_text_is_told_by_its_statement(parse):
    message = refused(parse, OK, validate=raising(AssertionError))
    assert "raise error (test_arguments.py:" in message


def test_mistakes_in_code_keep_their_traceback(parse):
    with pytest.raises(TypeError, match="a bug"):
        parse(OK, validate=raising(TypeError("a bug")))
    with pytest.raises(ConfigError, match=r"^ours$"):
        parse(OK, validate=raising(ConfigError("ours")))


@pytest.mark.parametrize(
    ("world", "flags", "message"),
    [
        (2, "--tensor-model-parallel-size 3", "2 ranks cannot hold TP 3 x PP 1 x CP 1"),
        (6, "--pipeline-model-parallel-size 4", "start a multiple of 4 ranks"),
        (4, "--context-parallel-size 8", "4 ranks cannot hold TP 1 x PP 1 x CP 8"),
        (4, "--expert-model-parallel-size 3", "4 ranks cannot hold expert TP 1 x EP 3 x PP 1"),
        (
            4,
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel",
            "expert TP 2 x EP 4 x PP 1: start a multiple of 8 ranks",
        ),
        (
            4,
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4",
            "expert TP 1 x EP 4 x PP 2: start a multiple of 8 ranks",
        ),
        (
            4,
            "--tensor-model-parallel-size 2 --num-experts 8",
            "--sequence-parallel is missing: experts with --tensor-model-parallel-size 2",
        ),
    ],
)
def test_impossible_layouts(parse, monkeypatch, world, flags, message):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert message in refused(parse, f"{OK} {flags}")


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --num-experts 8 --sequence-parallel",
        "--tensor-model-parallel-size 2 --num-experts 8 --skip-train",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --num-experts 8 "
        "--expert-tensor-parallel-size 1 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
    ],
)
def test_possible_layouts(parse, monkeypatch, flags):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse(f"{OK} {flags}").tensor_model_parallel_size in (1, 2)


@pytest.mark.parametrize("flag", [spelled(name) for name in PATHS])
def test_missing_data_is_named(parse, tmp_path, flag):
    there, other = tmp_path / "there", tmp_path / "other"
    for suffix in (".bin", ".idx"):
        there.with_suffix(suffix).touch()
    assert parse(f"{OK} {flag} 0.5 {there} 0.5 s3://bucket/corpus")
    message = refused(parse, f"{OK} {flag} 0.5 {there} 0.5 {other}")
    assert f"{flag} {other}: there is no {other}.bin" in message
    assert "prepare-data" in message
    there.with_suffix(".idx").unlink()
    assert f"there is no {there}.idx" in refused(parse, f"{OK} {flag} {there}")


def test_tokenizer_files(parse, tmp_path):
    model = tmp_path / "t.model"
    assert f"--tokenizer-model {model}: no such file" in refused(
        parse, f"{OK} --tokenizer-model {model}"
    )
    model.touch()
    assert parse(f"{OK} --tokenizer-model {model}")
    hub = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert parse(f"{OK} {hub} some-org/some-model")
    assert "no such file" in refused(parse, f"{OK} {hub} ./some-org/some-model")


def test_on_the_cpu_defaults_are_those_of_a_cpu(parse, on_cpu):
    args = parse(f"{OK} --async-save")
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert (args.async_strategy, args.attention_backend) == ("mcore", "unfused")
    assert args.use_persistent_ckpt_worker  # else Megatron drops --async-save without a word
    assert not hasattr(args, "no_persist_layer_norm")  # this parser does not know it


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--transformer-impl transformer_engine", "leave --transformer-impl out, or pass local"),
        ("--distributed-backend nccl", "leave --distributed-backend out, or pass gloo"),
        ("--moe-grouped-gemm", "drop --moe-grouped-gemm"),
        ("--multi-latent-attention", "its attention needs Transformer Engine"),
        ("--async-strategy nvrx", "leave --async-strategy out"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_the_cpu_alone(parse, request, flags, message):
    assert parse(f"{OK} {flags}")
    request.getfixturevalue("on_cpu")
    text = refused(parse, f"{OK} {flags}")
    assert text.startswith(flags.split()[0])
    assert "not on the CPU backend" in text
    assert message in text


def test_every_default_of_a_cpu_passes_its_own_check(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu.adapt(argparse.Namespace(async_save=False, **cpu.DEFAULTS))
