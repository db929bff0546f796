"""SentencePiece tokenizers that Megatron's `--tokenizer-type SentencePieceTokenizer` reads."""

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from megatron_resilient.errors import ConfigError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

MAX_TRAINING_BYTES = 64 * 2**20
"""Text that a tokenizer is trained on; of a larger corpus a part is drawn, line by line."""

SPECIAL_PIECES = ("<unk>", "<s>", "</s>", "<pad>")
"""Ids 0 to 3. Padding has an id of its own because Megatron masks the loss where it stands."""

MIN_VOCABULARY = len(SPECIAL_PIECES) + 256
"""Every byte is a piece, so that any text has a form without <unk>."""

_LINE_CHARACTERS = 4096
_MAX_UTF8_BYTES = 4
_SENTENCEPIECE_SILENT = 4


def _sentencepiece() -> ModuleType:
    try:
        import sentencepiece
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sentencepiece is not installed; install megatron-resilient[tools]"
        ) from error
    return sentencepiece


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-pair tokenizer that keeps text as it is.

    No normalisation, no space added in front, runs of spaces are pieces, and what has no piece is
    spelled in bytes; so ids decode to the text they came from, except that SentencePiece cannot
    tell its own space mark U+2581 from a space. The same lines give the same bytes.

    Args:
        lines: text without line ends, see `training_lines`.
        vocab_size: pieces, special ones and the 256 bytes included.

    Returns:
        A serialised SentencePiece model.

    Raises:
        ConfigError: the vocabulary is smaller than the alphabet of the text needs or larger than
            the text yields.
    """
    sentencepiece = _sentencepiece()
    if vocab_size <= MIN_VOCABULARY:
        raise ConfigError(
            f"--train-tokenizer {vocab_size}: {MIN_VOCABULARY} pieces go to special tokens and"
            " bytes; ask for more"
        )
    model = io.BytesIO()
    # SentencePiece turns an error of the iterator into one of its own: keep the first.
    raised: list[BaseException] = []

    def guarded() -> Iterator[str]:
        try:
            yield from lines
        except BaseException as error:
            raised.append(error)
            raise

    unk, bos, eos, pad = range(len(SPECIAL_PIECES))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=guarded(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_LINE_CHARACTERS * _MAX_UTF8_BYTES,
            unk_id=unk,
            bos_id=bos,
            eos_id=eos,
            pad_id=pad,
            minloglevel=_SENTENCEPIECE_SILENT,
        )
    except RuntimeError as error:
        if raised:
            raise raised[0] from None
        _explain(vocab_size, error)
    return model.getvalue()


def _explain(vocab_size: int, error: RuntimeError) -> NoReturn:
    message = str(error)
    if found := re.search(r"Vocabulary size too high .* <= (\d+)", message):
        raise ConfigError(
            f"--train-tokenizer {vocab_size}: the input yields at most {found[1]} pieces; ask for"
            f" {found[1]} or fewer, or give more text"
        ) from error
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        raise ConfigError(
            f"--train-tokenizer {vocab_size}: bytes and the characters of the input alone need"
            f" {found[1]} pieces; ask for more"
        ) from error
    if "!sentences_.empty()" in message:
        raise ConfigError(
            f"--train-tokenizer {vocab_size}: the input has no text to learn from"
        ) from error
    raise ConfigError(
        f"--train-tokenizer {vocab_size}: SentencePiece cannot train on this input: {message}"
    ) from error


def training_lines(texts: Iterable[str], fraction: float, seed: int = 0) -> Iterator[str]:
    """Yields the lines of texts, each with probability `fraction`, the same ones every time.

    Long lines are cut: SentencePiece drops what exceeds its limit without a word.
    """
    generator = random.Random(seed)
    for text in texts:
        for line in text.split("\n"):
            if line and (fraction >= 1 or generator.random() < fraction):
                for start in range(0, len(line), _LINE_CHARACTERS):
                    yield line[start : start + _LINE_CHARACTERS]


def load_tokenizer(path: Path, needs_end_of_document: bool) -> "SentencePieceProcessor":
    """Loads a SentencePiece model.

    Raises:
        ConfigError: there is no such file, it is no SentencePiece model, or it has no </s> although
            `needs_end_of_document` (Megatron's end of document is that id).
    """
    sentencepiece = _sentencepiece()
    if not path.is_file():
        raise ConfigError(f"{path}: no such tokenizer model; check --tokenizer-model")
    try:
        tokenizer: SentencePieceProcessor = sentencepiece.SentencePieceProcessor(
            model_file=str(path)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: not a SentencePiece model ({error}); give a .model file, or train one with"
            " --train-tokenizer"
        ) from error
    if needs_end_of_document and tokenizer.eos_id() < 0:
        raise ConfigError(
            f"{path}: the tokenizer has no </s>, which --append-eod writes after each document;"
            " take another tokenizer or leave --append-eod out"
        )
    return tokenizer
