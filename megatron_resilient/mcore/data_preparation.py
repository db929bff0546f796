"""Text to a dataset and a tokenizer that Megatron trains on.

Megatron itself is imported when the first token is about to be written, so that wrong input is
told at once.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_resilient.corpus.documents import InputOptions, InputPlan, plan_input, read_documents
from megatron_resilient.corpus.staged_output import staged_output
from megatron_resilient.corpus.tokenizer import (
    MAX_TRAINING_BYTES,
    load_tokenizer,
    train_tokenizer,
    training_lines,
)
from megatron_resilient.errors import ConfigError, DataError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and the input bytes done and in all (0, 0: not known)."""


@dataclass(frozen=True)
class PreparationRequest:
    """What to prepare.

    Attributes:
        inputs: files and folders, in this order.
        output: path of the files to write, without their suffix.
        input_options: which files of a folder, and how they are read.
        tokenizer_model: a SentencePiece model; None trains one.
        vocab_size: of the tokenizer to train; None if one is given.
        append_end_of_document: whether </s> ends each document.
        workers: processes that tokenise; the output does not depend on it.
        overwrite: whether files that exist may be replaced.
    """

    inputs: tuple[Path, ...]
    output: Path
    input_options: InputOptions = field(default_factory=InputOptions)
    tokenizer_model: Path | None = None
    vocab_size: int | None = None
    append_end_of_document: bool = False
    workers: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        if (self.tokenizer_model is None) == (self.vocab_size is None):
            raise ConfigError("give either --tokenizer-model or --train-tokenizer")
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: at least 1 process is needed")
        if self.output.suffix in (".bin", ".idx"):
            raise ConfigError(
                f"--output {self.output}: give the path without {self.output.suffix}; both .bin and"
                " .idx are written"
            )


@dataclass(frozen=True)
class PreparationSummary:
    """What was written and what was left out.

    Attributes:
        data_path: for Megatron's --data-path.
        split: for Megatron's --split: each part has a document.
        tokenizer_model: for Megatron's --tokenizer-model.
        vocab_size: pieces of the tokenizer.
        trained_on_fraction: part of the lines that the tokenizer was trained on; None if given.
        token_dtype: integer type of the stored ids.
        end_of_document: whether </s> ends each document; it counts as a token.
        documents: written.
        tokens: written.
        text_bytes: of the documents in UTF-8.
        unknown_tokens: <unk> among the tokens.
        altered_documents: documents that do not decode to the text they came from.
        repaired_documents: documents with U+FFFD where they were not UTF-8.
        removed_caches: folders of Megatron's cached indices of an older dataset at this path.
        skipped: files and documents left out, by reason.
        seconds: by phase, and in total.
    """

    data_path: str
    split: str
    tokenizer_model: str
    vocab_size: int
    trained_on_fraction: float | None
    token_dtype: str
    end_of_document: bool
    documents: int
    tokens: int
    text_bytes: int
    unknown_tokens: int
    altered_documents: int
    repaired_documents: int
    removed_caches: int
    skipped: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def tokens_per_byte(self) -> float:
        """Tokens for a byte of text: the smaller, the better the tokenizer fits."""
        return self.tokens / self.text_bytes

    @property
    def pretrain_flags(self) -> list[str]:
        """What to pass to Megatron to train on this dataset."""
        flags = ["--data-path", self.data_path, "--split", self.split]
        if self.split.endswith(",0,0"):  # nothing to evaluate on
            flags += ["--eval-iters", "0"]
        tokenizer = ["--tokenizer-type", "SentencePieceTokenizer"]
        return [*flags, *tokenizer, "--tokenizer-model", self.tokenizer_model]

    def to_json(self) -> dict[str, Any]:
        """Returns the summary as a JSON document."""
        derived = {"tokens_per_byte": self.tokens_per_byte, "pretrain_flags": self.pretrain_flags}
        return asdict(self) | derived


def prepare(request: PreparationRequest, progress: Progress) -> PreparationSummary:
    """Reads, trains a tokenizer if asked, tokenises and writes `output.bin` and `output.idx`.

    A trained tokenizer is written to `output.model`. All files appear at the end; an error leaves
    what was there before.

    Args:
        request: what to prepare.
        progress: told what is going on.

    Raises:
        ConfigError: an output or a tokenizer that cannot work.
        DataError: input that cannot be read, or that holds no document.
    """
    started = time.monotonic()
    output = Path(os.path.abspath(request.output))
    model = Path(os.path.abspath(request.tokenizer_model or f"{output}.model"))
    suffixes = (".bin", ".idx") if request.tokenizer_model else (".model", ".bin", ".idx")
    if request.tokenizer_model:
        load_tokenizer(model, request.append_end_of_document)
    plan = plan_input(request.inputs, request.input_options)
    if not plan.sections:
        raise _no_documents(request, plan.skipped)
    with staged_output(output, suffixes, request.overwrite) as staged:
        staged_model, fraction = model, None
        if request.vocab_size is not None:
            fraction = min(1.0, MAX_TRAINING_BYTES / max(plan.size_bytes, 1))
            staged_model = staged.parent / f"{staged.name}.model"
            staged_model.write_bytes(_trained_tokenizer(request, plan, fraction, progress))
        planned = time.monotonic()

        progress("importing Megatron", 0, 0)
        from megatron_resilient.corpus.encoding import EncodingOptions, encode_sections
        from megatron_resilient.mcore import indexed_dataset

        imported = time.monotonic()
        vocab_size = load_tokenizer(staged_model, request.append_end_of_document).get_piece_size()
        dtype = indexed_dataset.token_dtype(vocab_size)
        options = EncodingOptions(staged_model, request.append_end_of_document, dtype)
        batches = encode_sections(plan.sections, request.input_options, options, request.workers)
        totals: Counter[str] = Counter()
        skipped = Counter(plan.skipped)
        read_bytes = 0
        for batch in indexed_dataset.write_indexed_dataset(batches, staged, dtype):
            totals.update(
                documents=len(batch.lengths),
                tokens=len(batch.ids),
                text_bytes=batch.text_bytes,
                unknown_tokens=batch.unknown_tokens,
                altered_documents=batch.altered_documents,
                repaired_documents=batch.repaired_documents,
            )
            skipped.update(batch.skipped)
            read_bytes += batch.read_bytes
            progress("tokenising", read_bytes, plan.size_bytes)
        if not totals["documents"]:
            raise _no_documents(request, skipped)
        removed_caches = indexed_dataset.remove_cached_indices(output)
    ended = time.monotonic()
    return PreparationSummary(
        data_path=str(output),
        split=indexed_dataset.suggest_split(totals["documents"]),
        tokenizer_model=str(model),
        vocab_size=vocab_size,
        trained_on_fraction=fraction,
        token_dtype=dtype,
        end_of_document=request.append_end_of_document,
        removed_caches=removed_caches,
        skipped=dict(sorted(skipped.items())),
        seconds={
            "plan_and_train_tokenizer": planned - started,
            "import_megatron": imported - planned,
            "tokenise_and_write": ended - imported,
            "total": ended - started,
        },
        **totals,
    )


def _trained_tokenizer(
    request: PreparationRequest, plan: InputPlan, fraction: float, progress: Progress
) -> bytes:
    def texts() -> Iterator[str]:
        read_bytes = 0
        for section in plan.sections:
            # What is left out is counted when the documents are written.
            for document in read_documents(section, request.input_options, Counter()):
                yield document.text
            read_bytes += section.size_bytes
            progress("reading for the tokenizer", read_bytes, plan.size_bytes)
        progress("training the tokenizer", 0, 0)

    assert request.vocab_size is not None
    return train_tokenizer(training_lines(texts(), fraction), request.vocab_size)


def _no_documents(request: PreparationRequest, skipped: Mapping[str, int]) -> DataError:
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    paths = ", ".join(map(str, request.inputs))
    return DataError(
        f"{paths}: no document to write; left out: {left_out or 'nothing'}; check --input, --glob"
        " and --exclude"
    )
