"""Text to token ids, in as many processes as asked, in an order that does not depend on them."""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_resilient.corpus.documents import SECTION_BYTES, InputOptions, Section, read_documents
from megatron_resilient.corpus.tokenizer import load_tokenizer
from megatron_resilient.errors import DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_BATCHES_AHEAD = 2  # per worker: keeps them busy while results are written, and bounds memory


@dataclass(frozen=True)
class EncodingOptions:
    """How documents become ids.

    Attributes:
        tokenizer_model: path of a SentencePiece model.
        append_end_of_document: whether </s> ends each document.
        token_dtype: name of the integer type of ids, large enough for the vocabulary.
    """

    tokenizer_model: Path
    append_end_of_document: bool
    token_dtype: str


@dataclass(frozen=True)
class EncodedBatch:
    """Documents as ids.

    Attributes:
        ids: all tokens, document after document, shape (tokens,).
        lengths: tokens of each document, shape (documents,).
        read_bytes: bytes of the input files that this batch stands for.
        text_bytes: UTF-8 bytes of the documents.
        unknown_tokens: how many ids are <unk>: what stood there is lost.
        altered_documents: documents that do not decode to the same text.
        repaired_documents: documents that were not UTF-8 and were repaired.
        skipped: what was left out, by reason.
    """

    ids: np.ndarray
    lengths: np.ndarray
    read_bytes: int
    text_bytes: int
    unknown_tokens: int
    altered_documents: int
    repaired_documents: int
    skipped: Counter[str]


def encode_sections(
    sections: Sequence[Section],
    input_options: InputOptions,
    encoding_options: EncodingOptions,
    workers: int,
) -> Iterator[EncodedBatch]:
    """Yields encoded documents in the order of the sections.

    Workers read their sections themselves, so only ids pass between processes. At most
    `workers * (1 + _BATCHES_AHEAD)` batches are held.

    Args:
        sections: what to encode, see `documents.plan_input`.
        input_options: how documents are read.
        encoding_options: how they are encoded.
        workers: processes; 1 encodes in the calling one.

    Raises:
        DataError: of the first section, in order, that cannot be read; or a worker has died.
    """
    batches = _batches(sections)
    if workers == 1:
        encoder = _Encoder(input_options, encoding_options)
        yield from map(encoder.encode, batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A fork would copy the threads' locks that torch may hold in this process.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(input_options, encoding_options),
    )
    waiting: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > workers * (1 + _BATCHES_AHEAD):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process died, most likely for want of memory; use fewer --workers or"
            " smaller documents"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(sections: Iterable[Section]) -> Iterator[tuple[Section, ...]]:
    """Groups small sections, so that a process gets about a MiB at a time."""
    batch: list[Section] = []
    size_bytes = 0
    for section in sections:
        batch.append(section)
        size_bytes += section.size_bytes
        if size_bytes >= SECTION_BYTES:
            yield tuple(batch)
            batch, size_bytes = [], 0
    if batch:
        yield tuple(batch)


class _Encoder:
    """One tokenizer and how to use it."""

    def __init__(self, input_options: InputOptions, options: EncodingOptions):
        self._input_options = input_options
        self._dtype = np.dtype(options.token_dtype)
        self._tokenizer: SentencePieceProcessor = load_tokenizer(
            options.tokenizer_model, options.append_end_of_document
        )
        self._end = [self._tokenizer.eos_id()] if options.append_end_of_document else []

    def encode(self, sections: Sequence[Section]) -> EncodedBatch:
        skipped: Counter[str] = Counter()
        parts: list[np.ndarray] = []
        text_bytes = unknown_tokens = altered_documents = repaired_documents = 0
        for section in sections:
            for document in read_documents(section, self._input_options, skipped):
                ids = self._tokenizer.encode(document.text)
                if not ids:  # a tokenizer may normalise a document away
                    skipped["no tokens"] += 1
                    continue
                altered_documents += self._tokenizer.decode(ids) != document.text
                repaired_documents += document.repaired
                text_bytes += document.size_bytes
                part = np.array(ids + self._end, dtype=self._dtype)
                unknown_tokens += int(np.count_nonzero(part == self._tokenizer.unk_id()))
                parts.append(part)
        return EncodedBatch(
            ids=np.concatenate(parts) if parts else np.empty(0, self._dtype),
            lengths=np.array([len(part) for part in parts], dtype=np.int64),
            read_bytes=sum(section.size_bytes for section in sections),
            text_bytes=text_bytes,
            unknown_tokens=unknown_tokens,
            altered_documents=altered_documents,
            repaired_documents=repaired_documents,
            skipped=skipped,
        )


_encoder: _Encoder | None = None


def _start_worker(input_options: InputOptions, options: EncodingOptions) -> None:
    global _encoder
    # The parent answers an interrupt for all; should it be killed, nobody else would stop us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = _Encoder(input_options, options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(sections: Sequence[Section]) -> EncodedBatch:
    assert _encoder is not None
    return _encoder.encode(sections)
