"""A folder that appears whole, or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.errors import CheckpointError


@contextlib.contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `final` to write to, which becomes `final` at the end.

    What an earlier process left there when it was killed is taken away first. An error of the body
    removes the hidden folder.

    Args:
        final: does not exist, or is an empty folder.

    Yields:
        The hidden folder; the body makes what it writes durable.

    Raises:
        CheckpointError: `final` has something in it, cannot be created, or another process is
            about to create it.
    """
    check_free(final)
    hidden = final.parent / f".{final.name}.consolidating"
    try:
        hidden.mkdir(exist_ok=True)
        descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"{hidden}: cannot be created: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{final}: another process writes it; wait for it") from error
        _empty(hidden)
        try:
            yield hidden
            check_free(final)
            os.rename(hidden, final)  # over an empty folder, too
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        places.fsync_folder(final.parent)
    finally:
        os.close(descriptor)


def check_free(final: Path) -> None:
    """Checks that a folder may be created.

    Raises:
        CheckpointError: there is something, or no folder to create it in.
    """
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise CheckpointError(f"{final}: is no folder; name another one")
    if final.is_dir() and any(final.iterdir()):
        raise CheckpointError(f"{final}: has something in it; name a new or an empty folder")
    if not final.absolute().parent.is_dir():
        raise CheckpointError(f"{final}: there is no folder {final.absolute().parent}; create it")


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
