"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Writes `path`; a reader, or a crash at any moment, sees the old text or the new one.

    Raises:
        OSError: It could not be written; the old file, if there was one, is as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
