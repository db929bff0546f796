"""Other people's exceptions, told in one line."""

import os
import textwrap
import traceback

_LONGEST = 400  # characters: some list every tensor of the model


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's text.

    Of an error that several ranks reported together it is that of the first rank; of one without
    text, such as a bare assert, the statement that raised it is the best description there is.
    """
    failures = getattr(error, "failures", None)  # torch's CheckpointException: {rank: (error, ...)}
    if isinstance(failures, dict) and failures:
        return one_line(failures[min(failures)][0])
    text = str(error).strip()
    if isinstance(error, KeyError) and text:
        return f"KeyError: {text}"
    if text:
        return textwrap.shorten(text.splitlines()[0], _LONGEST, placeholder=" ...")
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    return f"{frames[-1].line} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
