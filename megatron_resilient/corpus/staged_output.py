"""Several files that appear together, or not at all."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_resilient.errors import ConfigError


@contextmanager
def staged_output(prefix: Path, suffixes: Sequence[str], overwrite: bool) -> Iterator[Path]:
    """Gives a prefix to write to, and moves the files to `prefix` at the end.

    The files are written to a hidden folder beside their final place. They are moved when the body
    ends without an error, in the order of `suffixes`; the last one is the commit marker: old files
    lose theirs first, so that old and new are never taken for a pair. An error removes what was
    written and leaves old files as they were.

    Args:
        prefix: final path of the files without their suffix.
        suffixes: of all files that the body writes, e.g. `(".bin", ".idx")`.
        overwrite: whether files that exist may be replaced.

    Yields:
        The prefix to write to.

    Raises:
        ConfigError: a file exists and may not be replaced, or the folder cannot be written to.
    """
    finals = [_with_suffix(prefix, suffix) for suffix in suffixes]
    for final in finals:
        if final.is_dir():
            raise ConfigError(f"{final}: is a folder; choose another --output")
        if final.exists() and not overwrite:
            raise ConfigError(f"{final}: exists; choose another --output or add --overwrite")
    if not prefix.parent.is_dir():
        raise ConfigError(f"{prefix.parent}: no such folder; create it or change --output")
    try:
        folder = tempfile.TemporaryDirectory(
            dir=prefix.parent, prefix=f".{prefix.name}.", suffix=".tmp"
        )
    except OSError as error:
        raise ConfigError(
            f"{prefix.parent}: cannot be written to ({error.strerror}); change --output"
        ) from error
    with folder as name:
        staged = Path(name) / prefix.name
        yield staged
        finals[-1].unlink(missing_ok=True)
        for suffix, final in zip(suffixes, finals, strict=True):
            _with_suffix(staged, suffix).replace(final)


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Not Path.with_suffix, which would cut "corpus.v1" to "corpus".
    return prefix.parent / (prefix.name + suffix)
