import json
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from megatron_resilient import cli
from megatron_resilient.commands import prepare_data
from megatron_resilient.corpus.encoding import EncodedBatch
from megatron_resilient.corpus.tokenizer import train_tokenizer, training_lines

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config.training_config import TokenizerConfig

    from megatron_resilient.mcore import indexed_dataset

SOURCE = Path(json.__file__).parent
TEXTS = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py"))]


@pytest.fixture(autouse=True)
def only_this_command(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", ("prepare-data",))
    monkeypatch.setenv("RANK", "0")  # as under any launcher; Megatron warns without


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.py").write_text(text)
    lines = ({"text": f"# {number}\n{text}"} for number, text in enumerate(TEXTS * 4))
    (folder / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / ".hidden").write_text("not read")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "json.model"
    path.write_bytes(train_tokenizer(training_lines(TEXTS, 1), 500))
    return path


EXPECTED = [*TEXTS, *(f"# {number}\n{text}" for number, text in enumerate(TEXTS * 4))]


def prepare(*arguments, expect=0):
    assert cli.main(["prepare-data", *map(str, arguments)]) == expect


def prepare_json(capsys, *arguments):
    prepare(*arguments, "--json")
    captured = capsys.readouterr()
    return json.loads(captured.out)


def flags(summary):
    names = summary["pretrain_flags"][::2]
    return dict(zip(names, summary["pretrain_flags"][1::2], strict=True))


def stock_tokenizer(summary):
    """The tokenizer as stock pretrain builds it from the flags that were printed."""
    given = flags(summary)
    defaults = {field.name: field.default for field in fields(TokenizerConfig)}
    args = Namespace(**defaults, make_vocab_size_divisible_by=128, tensor_model_parallel_size=1)
    args.rank = 0
    args.tokenizer_type = given["--tokenizer-type"]
    args.tokenizer_model = given["--tokenizer-model"]
    return build_tokenizer(args)


def gpt_datasets(summary, samples):
    """Train, validation and test sets as stock pretrain builds them from the flags."""
    given = flags(summary)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        blend=([given["--data-path"]], None),
        split=given["--split"],
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
        tokenizer=stock_tokenizer(summary),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


def read_back(prefix):
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


@pytest.mark.parametrize("append", [False, True])
def test_megatron_reads_what_was_written(corpus, tmp_path, capsys, append):
    arguments = ["--append-eod"] if append else []
    prefix = tmp_path / "corpus.v1"
    summary = prepare_json(
        capsys, "--input", corpus, "--output", prefix, "--train-tokenizer", 500, *arguments
    )
    tokenizer = stock_tokenizer(summary)
    assert tokenizer.vocab_size == 500
    assert tokenizer.eod == 2
    documents = read_back(prefix)
    end = [tokenizer.eod] if append else []
    assert documents == [tokenizer.tokenize(text) + end for text in EXPECTED]
    bodies = [document[: len(document) - len(end)] for document in documents]
    assert [tokenizer.detokenize(body) for body in bodies] == EXPECTED
    text_bytes = sum(len(text.encode()) for text in EXPECTED)
    tokens = sum(map(len, documents))
    assert IndexedDataset(str(prefix)).index.dtype == np.uint16
    assert summary["seconds"].pop("total") >= max(summary.pop("seconds").values())
    assert summary == {
        "data_path": str(prefix),
        "split": "90,10,0",
        "tokenizer_model": f"{prefix}.model",
        "vocab_size": 500,
        "trained_on_fraction": 1.0,
        "token_dtype": "uint16",
        "end_of_document": append,
        "documents": len(EXPECTED),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "unknown_tokens": 0,
        "altered_documents": 0,
        "repaired_documents": 0,
        "removed_caches": 0,
        "skipped": {"hidden": 1},
        "tokens_per_byte": tokens / text_bytes,
        "pretrain_flags": [
            *("--data-path", str(prefix), "--split", "90,10,0"),
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", f"{prefix}.model"),
        ],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("corpus", "corpus.v1.bin", "corpus.v1.idx", "corpus.v1.model")
    ]


def test_the_files_do_not_depend_on_workers(corpus, tmp_path):
    for workers in (1, 3):
        prepare(
            *("--input", corpus, "--output", tmp_path / f"out{workers}"),
            *("--train-tokenizer", 400, "--workers", workers),
        )
    for suffix in (".model", ".bin", ".idx"):
        one, three = ((tmp_path / f"out{workers}{suffix}").read_bytes() for workers in (1, 3))
        assert one == three


@pytest.mark.parametrize("copies", [1, 4, 5, 200])
def test_stock_datasets_are_built_from_the_flags(tmp_path, capsys, model, copies):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": TEXTS[0]}) + "\n") * copies)
    given = ["--input", path, "--output", tmp_path / "a", "--tokenizer-model", model]
    summary = prepare_json(capsys, *given, "--append-eod", "--workers", 1)
    train, valid, _ = gpt_datasets(summary, (300, 5, None))
    # A split of a few documents has no validation part: then there is nothing to evaluate on.
    assert (valid is None) == (copies < 5) == (flags(summary).get("--eval-iters") == "0")
    document = [*stock_tokenizer(summary).tokenize(TEXTS[0]), 2]
    stream = document * (2 + 33 // len(document))
    windows = {tuple(stream[start : start + 33]) for start in range(len(document))}
    for index in range(0, 300, 50):
        sample = train[index]
        assert (*sample["tokens"].tolist(), sample["labels"][-1].item()) in windows


def test_indices_of_an_older_dataset_are_not_used(tmp_path, capsys, model):
    source, prefix = tmp_path / "a.txt", tmp_path / "a"
    given = ["--input", source, "--output", prefix, "--tokenizer-model", model, "--workers", 1]
    source.write_text("old " * 5000)
    old = prepare_json(capsys, *given)
    assert len(gpt_datasets(old, (5, None, None))[0]) >= 5
    assert list((prefix / "cache" / "GPTDataset_indices").iterdir())
    source.write_text("new " * 20)
    new = prepare_json(capsys, *given, "--overwrite")
    assert new["removed_caches"] == 1
    (train, _, _) = gpt_datasets(new, (5, None, None))
    words = stock_tokenizer(new).detokenize(train[0]["tokens"].tolist()).split()
    assert "new" in words
    assert "old" not in words


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    assert indexed_dataset.token_dtype(4096) == "uint16"
    assert indexed_dataset.token_dtype(128_000) == "int32"
    batch = EncodedBatch(
        ids=np.array([70_000, 1, 2], dtype=np.int32),
        lengths=np.array([1, 2]),
        read_bytes=0,
        text_bytes=0,
        unknown_tokens=0,
        altered_documents=0,
        repaired_documents=0,
        skipped=Counter(),
    )
    list(indexed_dataset.write_indexed_dataset([batch], tmp_path / "a", "int32"))
    assert read_back(tmp_path / "a") == [[70_000], [1, 2]]


@pytest.mark.parametrize(
    ("documents", "split"),
    [(4, "100,0,0"), (5, "90,10,0"), (500, "90,10,0"), (501, "969,30,1"), (10**8, "969,30,1")],
)
def test_the_split_has_no_empty_part(documents, split):
    assert indexed_dataset.suggest_split(documents) == split


def test_human_summary(corpus, tmp_path, capsys, model):
    (corpus / "mark.txt").write_text("a ▁ b")
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    prepare(
        *("--input", corpus, "--output", tmp_path / "my data", "--tokenizer-model", model),
        *("--encoding-errors", "replace", "--glob", "*.txt"),
    )
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["documents", "2"]
    assert [line.split()[:2] for line in lines[1:6]] == [
        *(["tokens", lines[1].split()[1]], ["bytes", "of"], ["tokens", "per"]),
        *(["left", "out"], ["seconds", "plan"]),
    ]
    assert lines[4].endswith(f"1 hidden, {len(TEXTS) + 1} not matched by --glob")
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == 3
    assert "--append-eod" in notes[0]
    assert "1 of 2 documents do not decode" in notes[1]
    assert "1 documents were not UTF-8" in notes[2]
    assert shlex.split(lines[-1])[:2] == ["--data-path", str(tmp_path / "my data")]
    assert not captured.err


def test_a_sampled_tokenizer_is_told(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_resilient.mcore.data_preparation.MAX_TRAINING_BYTES", 60_000)
    prepare("--input", corpus, "--output", tmp_path / "out", "--train-tokenizer", 400)
    size_bytes = sum(path.stat().st_size for path in corpus.glob("[!.]*"))
    part = f"{60_000 / size_bytes:.1%}"
    assert f"note: the tokenizer was trained on {part} of the lines" in capsys.readouterr().out


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# {corpus}, {out} and {model} stand for good paths; each case spoils one thing.
GOOD = "--input {corpus} --output {out} --tokenizer-model {model}"
TRAIN = "--input {corpus} --output {out} --train-tokenizer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GOOD.replace("{corpus}", "{corpus}/nothing"), r"corpus/nothing: no such file or folder"),
        (GOOD + " --glob *.rs", r"corpus: no document to write; left out: 1 hidden, \d+ not"),
        (GOOD.replace("{corpus}", "{empty}"), r"empty: no document to write; left out: nothing"),
        (GOOD.replace("{corpus}", "{blank}"), r"blank\.txt: no document to write; left .* 1 empty"),
        (GOOD.replace("{corpus}", "{latin}"), r"latin\.txt: not UTF-8 at byte 3 "),
        (GOOD.replace("{corpus}", "{latin}") + " --encoding-errors skip", r"out: 1 not UTF-8"),
        (TRAIN.replace("{corpus}", "{latin}") + " 300", r"latin\.txt: not UTF-8 at byte 3 "),
        (GOOD + " --json-key body", r"more\.jsonl:1: no key 'body'; it has 'text'"),
        (GOOD.replace("{out}", "{out}.bin"), r"--output .*out\.bin: give the path without \.bin"),
        (GOOD.replace("{out}", "{empty}/"), r"--output .*empty/: add a file name to the folder"),
        (GOOD.replace("{out}", "{empty}/no/out"), r"empty/no: no such folder; create it"),
        (GOOD.replace("{out}", "{blank}/out"), r"blank\.txt: no such folder"),
        (GOOD.replace("{out}", "/proc/out"), r"/proc: cannot be written to"),
        (GOOD.replace("{out}", "{taken}"), r"taken\.idx: exists; .* add --overwrite"),
        (GOOD.replace("{out}", "{folder}") + " --overwrite", r"folder\.bin: is a folder"),
        (GOOD.replace("{model}", "{model}.not"), r"model\.not: no such tokenizer model"),
        (GOOD.replace("{model}", "{blank}"), r"blank\.txt: not a SentencePiece model"),
        (GOOD + " --workers 0", r"--workers 0: at least 1"),
        (TRAIN + " 100000", r"--train-tokenizer 100000: the input yields at most \d+ pieces"),
        (TRAIN + " 200", r"--train-tokenizer 200: 260 pieces go to"),
        (TRAIN.replace("{out}", "{tokenizer}") + " 300", r"tokenizer\.model: exists"),
    ],
)
def test_an_error_is_one_line_and_writes_nothing(
    corpus, tmp_path, capsys, model, arguments, message
):
    paths = {
        name: tmp_path / name for name in ("corpus", "out", "empty", "taken", "folder", "tokenizer")
    }
    paths |= {"model": model, "blank": tmp_path / "blank.txt", "latin": tmp_path / "latin.txt"}
    paths["empty"].mkdir()
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "taken.idx").write_text("old")
    (tmp_path / "tokenizer.model").write_text("old")
    paths["blank"].write_text("")
    paths["latin"].write_bytes(b"caf\xe9")
    before = snapshot(tmp_path)
    prepare(*(word.format(**paths) for word in arguments.split()), expect=2)
    captured = capsys.readouterr()
    assert snapshot(tmp_path) == before
    assert not captured.out
    assert re.fullmatch(rf"megatron-resilient prepare-data: .*{message}.*\n", captured.err)


@pytest.mark.parametrize("tokenizer", [[], ["--tokenizer-model", "m", "--train-tokenizer", "300"]])
def test_exactly_one_tokenizer(corpus, tmp_path, capsys, tokenizer):
    arguments = ["prepare-data", "--input", str(corpus), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, *tokenizer])
    assert stop.value.code == 2
    assert "--tokenizer-model" in capsys.readouterr().err


def test_overwriting_replaces_all_or_nothing(corpus, tmp_path, capsys, model):
    given = ["--input", corpus, "--output", tmp_path / "out", "--train-tokenizer", 400]
    prepare(*given)
    old = snapshot(tmp_path)
    (corpus / "zzz.txt").write_bytes(b"\xff")
    prepare(*given, "--overwrite", expect=2)
    (corpus / "zzz.txt").unlink()
    assert snapshot(tmp_path) == old
    prepare(*given, expect=2)
    assert snapshot(tmp_path) == old
    prepare(*given[:-1], 420, "--overwrite")
    new = snapshot(tmp_path)
    assert new.keys() == old.keys()
    for suffix in (".model", ".bin", ".idx"):
        changed = Path(f"{tmp_path / 'out'}{suffix}")
        assert suffix == ".idx" or new[changed] != old[changed]
    assert len(read_back(tmp_path / "out")) == len(EXPECTED)


def terminated():
    with prepare_data._terminable():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()


def test_sigterm_cleans_up_and_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        terminated()
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_progress_is_shown_on_a_terminal(corpus, tmp_path, capsys, monkeypatch, model):
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare("--input", corpus, "--output", tmp_path / "out", "--tokenizer-model", model)
    captured = capsys.readouterr()
    assert "tokenising" in captured.err
    assert "100%" in captured.err
    assert "documents" in captured.out


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from megatron_resilient import cli\n"
        "cli.COMMANDS = ('prepare-data',)\n"
        "try:\n"
        "    cli.main(['prepare-data', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'numpy', 'megatron', 'sentencepiece', 'rich'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--train-tokenizer" in done.stdout
