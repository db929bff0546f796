"""Token ids to the files that Megatron's `--data-path` reads.

Importing this module imports Megatron, which takes seconds.
"""

import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_resilient.corpus.encoding import EncodedBatch

with warnings.catch_warnings():
    # That Transformer Engine and Apex are missing matters to training, not here.
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

_SPLITS = ("969,30,1", "90,10,0")
_TRAIN_ONLY = "100,0,0"


def token_dtype(vocab_size: int) -> str:
    """Returns the name of the integer type that Megatron stores ids of such a vocabulary in."""
    return str(DType.optimal_dtype(vocab_size).__name__)


def write_indexed_dataset(
    batches: Iterable[EncodedBatch], prefix: Path, dtype: str
) -> Iterator[EncodedBatch]:
    """Writes `prefix.bin` batch by batch and `prefix.idx` at the end.

    A document is one sequence, as GPT pretraining wants it.

    Args:
        batches: documents in their final order.
        prefix: path of both files without their suffix.
        dtype: of the ids, see `token_dtype`.

    Yields:
        Each batch once it is written; the files are complete when the iterator ends.
    """
    builder = IndexedDatasetBuilder(
        get_bin_path(str(prefix)), dtype=DType.dtype_from_code(DType[dtype].value)
    )
    try:
        for batch in batches:
            start = 0
            for length in batch.lengths.tolist():
                builder.add_document(batch.ids[start : start + length], [length])
                start += length
            yield batch
    except BaseException:
        builder.data_file.close()
        raise
    builder.finalize(get_idx_path(str(prefix)))


def suggest_split(documents: int) -> str:
    """Returns a `--split` in which every part that is asked for has a document.

    Megatron cuts the list of documents at rounded fractions and does not check: a part that comes
    out empty makes it count epochs of zero tokens for ever.
    """
    for split in _SPLITS:
        # As in BlendedMegatronDatasetBuilder._build_megatron_dataset_splits.
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        bounds = [tuple(round(edge * float(documents)) for edge in part) for part in matrix if part]
        if all(begin < end for begin, end in bounds):
            return split
    return _TRAIN_ONLY


def remove_cached_indices(prefix: Path) -> int:
    """Removes the sample indices that Megatron cached for an earlier dataset at this path.

    Megatron knows them by path, not by content: it would read new tokens by old indices.

    Returns:
        The number of cache folders removed.
    """
    folders = sorted(prefix.glob("cache/*_indices"))
    for folder in folders:
        shutil.rmtree(folder)
    return len(folders)
