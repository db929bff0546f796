import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_resilient.corpus.documents import InputOptions, plan_input
from megatron_resilient.corpus.encoding import EncodingOptions, encode_sections
from megatron_resilient.corpus.tokenizer import (
    SPECIAL_PIECES,
    load_tokenizer,
    train_tokenizer,
    training_lines,
)
from megatron_resilient.errors import ConfigError, DataError

SOURCE = Path(json.__file__).parent
TEXTS = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "json.model"
    path.write_bytes(train_tokenizer(training_lines(TEXTS, 1), 600))
    return path


def foreign_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=training_lines(TEXTS, 1),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        minloglevel=4,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


def encode(paths, model, *, append=False, workers=1, dtype="uint16"):
    options = InputOptions()
    sections = plan_input([Path(path) for path in paths], options).sections
    return list(encode_sections(sections, options, EncodingOptions(model, append, dtype), workers))


def test_training_is_deterministic(model):
    assert train_tokenizer(training_lines(TEXTS, 1), 600) == model.read_bytes()


def test_the_tokenizer_has_what_megatron_asks_for(model):
    tokenizer = load_tokenizer(model, needs_end_of_document=True)
    assert tokenizer.get_piece_size() == 600
    special = [tokenizer.id_to_piece(index) for index in range(4)]
    assert special == list(SPECIAL_PIECES)
    ids = [tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()]
    assert ids == [0, 1, 2, 3]


def test_the_tokenizer_has_learnt_from_the_text(model):
    tokenizer = load_tokenizer(model, needs_end_of_document=False)
    tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert tokens < 0.5 * sum(len(text.encode()) for text in TEXTS)
    assert tokenizer.encode("        return", out_type=str) == ["▁▁▁▁▁▁▁▁", "return"]


@settings(deadline=None)  # a busy machine is no error
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.booleans())
def test_documents_survive(tmp_path_factory, model, texts, append):
    path = tmp_path_factory.mktemp("documents") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (batch,) = encode([path], model, append=append)
    tokenizer = load_tokenizer(model, needs_end_of_document=append)
    documents = np.split(batch.ids, np.cumsum(batch.lengths)[:-1])
    if append:
        assert [document[-1] for document in documents] == [tokenizer.eos_id()] * len(texts)
        documents = [document[:-1] for document in documents]
    # SentencePiece writes a space as U+2581 inside, and reads one that stands in the text as such.
    spaced = [text.replace("▁", " ") for text in texts]
    assert [tokenizer.decode(document.tolist()) for document in documents] == spaced
    assert batch.altered_documents == sum("▁" in text for text in texts)
    assert batch.unknown_tokens == 0
    assert batch.text_bytes == sum(len(text.encode()) for text in texts)
    # No special token can be written by hand: only byte pieces and learnt ones.
    assert not np.isin(np.concatenate(documents), range(4)).any()


def test_what_a_foreign_tokenizer_loses_is_counted(tmp_path):
    model = foreign_model(tmp_path / "m.model")
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "import json"}\n{"text": "a  b"}\n{"text": "日 json"}\n{"text": " "}\n'
    )
    (batch,) = encode([path], model)
    assert len(batch.lengths) == 3
    assert batch.altered_documents == 2
    assert batch.unknown_tokens == 1
    assert batch.skipped == {"no tokens": 1}


def test_a_vocabulary_too_large_for_the_text(model):
    with pytest.raises(ConfigError, match=r"--train-tokenizer 500000: .* at most \d+ pieces") as e:
        train_tokenizer(training_lines(TEXTS, 1), 500_000)
    most = int(str(e.value).split("at most ")[1].split()[0])
    assert most > 600
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_proto=train_tokenizer(training_lines(TEXTS, 1), most)
    )
    assert tokenizer.get_piece_size() == most


@pytest.mark.parametrize(
    ("lines", "vocab_size", "message"),
    [
        (["abc"], 0, r"--train-tokenizer 0: 260 pieces go to special tokens and bytes"),
        (["abc"], 260, r"260 pieces go to special tokens and bytes"),
        (["a b c d e f"], 261, r"--train-tokenizer 261: .* alone need 267 pieces"),
        ([], 300, r"no text to learn from"),
        (["▅"], 300, r"no text to learn from"),
    ],
)
def test_vocabularies_that_cannot_be(lines, vocab_size, message):
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(lines, vocab_size)


def test_an_error_of_the_input_is_not_taken_for_one_of_sentencepiece():
    def lines():
        yield "some text"
        raise DataError("a.jsonl:2: no key")

    with pytest.raises(DataError, match=r"^a\.jsonl:2: no key$"):
        train_tokenizer(lines(), 300)


def test_training_lines():
    text = "\n".join(str(number) for number in range(10_000))
    assert list(training_lines(["a\n\n b\r\n", "c" * 5000], 1)) == [
        *("a", " b\r", "c" * 4096),
        "c" * 904,
    ]
    some = list(training_lines([text, text], 0.1))
    assert some == list(training_lines([text, text], 0.1))
    assert 1800 < len(some) < 2200
    assert set(some) < set(text.split("\n"))
    assert list(training_lines([text], 0.1, seed=1)) != list(training_lines([text], 0.1, seed=2))


@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256))])
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "m.model"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.model: not a SentencePiece model"):
        load_tokenizer(path, needs_end_of_document=False)


def test_a_tokenizer_without_end_of_document(tmp_path):
    path = foreign_model(tmp_path / "m.model", eos_id=-1)
    assert load_tokenizer(path, needs_end_of_document=False).eos_id() == -1
    with pytest.raises(ConfigError, match=r"m\.model: the tokenizer has no </s>"):
        load_tokenizer(path, needs_end_of_document=True)
    with pytest.raises(ConfigError, match=r"x\.model: no such tokenizer model"):
        load_tokenizer(tmp_path / "x.model", needs_end_of_document=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Several batches: small files, one larger than a batch, JSON-lines of several sections."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        (folder / f"small{number:02}.txt").write_text(TEXTS[number % len(TEXTS)])
    (folder / "large.txt").write_text("".join(TEXTS) * 30)
    with (folder / "lines.jsonl").open("w") as file:
        for number in range(250):
            text = f"{number} {TEXTS[number % len(TEXTS)]}"
            file.write(json.dumps({"text": text}) + "\n")
    return folder


def test_the_output_does_not_depend_on_workers(corpus, model):
    one, two, three = (encode([corpus], model, append=True, workers=n) for n in (1, 2, 3))
    assert len(one) > 3
    for other in (two, three):
        for ours, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(ours.ids, theirs.ids)
            np.testing.assert_array_equal(ours.lengths, theirs.lengths)
            assert ours.read_bytes == theirs.read_bytes
            assert ours.text_bytes == theirs.text_bytes
    assert sum(batch.read_bytes for batch in one) == sum(
        path.stat().st_size for path in corpus.iterdir()
    )


def test_an_error_in_a_worker_is_the_first_in_order(corpus, model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 at byte 0"):
        encode([corpus, tmp_path / "a.txt", tmp_path / "b.txt"], model, workers=2)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_told(corpus, model):
    options = InputOptions()
    sections = plan_input([corpus], options).sections * 20
    batches = encode_sections(sections, options, EncodingOptions(model, False, "uint16"), 2)
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a tokenising process died"):
        list(batches)


PARENT = """
import multiprocessing, sys
from pathlib import Path
from megatron_resilient.corpus.encoding import EncodingOptions, encode_sections
from megatron_resilient.corpus.documents import InputOptions, plan_input

if __name__ == "__main__":
    options = InputOptions()
    sections = plan_input([Path(sys.argv[1])], options).sections * 1000
    encoding = EncodingOptions(Path(sys.argv[2]), False, "uint16")
    for _ in encode_sections(sections, options, encoding, 2):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def test_workers_do_not_outlive_a_killed_parent(corpus, model, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(corpus), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        workers = parent.stdout.readline().split()
        parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.05)
    assert not any(map(alive, workers))


def alive(pid):
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
