"""The file that names the newest checkpoint: latest_checkpointed_iteration.txt."""

import math
import os
import re

from megatron.training import get_args

from megatron_resilient.errors import CheckpointError

_NAME = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7,}")


def check(path: str) -> None:
    """Checks that a tracker file holds an iteration number or `release`.

    Raises:
        CheckpointError: it holds something else.
    """
    if "://" in path:
        return  # object storage: Megatron's own reader has the client
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read().strip()
    if not (text.isascii() and text.isdigit()) and text != "release":
        raise CheckpointError(
            f"{path} holds {text[:40]!r}, not an iteration: write the number of the newest whole "
            f"checkpoint into it ({_found(os.path.dirname(path))})"
        )


def check_load_folder(load_arg: str) -> None:
    """Checks that a folder to load from has a checkpoint, or is the empty start of a new run.

    Args:
        load_arg: name of the argument that holds the folder, as in `load_checkpoint`.

    Raises:
        CheckpointError: training would start from random weights although it was told to load.
    """
    args = get_args()
    folder = getattr(args, load_arg)
    if folder is None or "://" in folder or args.non_persistent_ckpt_type is not None:
        return
    if is_there(folder) or args.ckpt_step is not None or args.pretrained_checkpoint is not None:
        return
    flag = "--" + load_arg.replace("_", "-")
    if _checkpoints(folder):
        raise CheckpointError(
            f"{flag} {folder}: checkpoints without {_NAME} ({_found(folder)}): write the number of "
            "the newest whole one into it, or pass --ckpt-step"
        )
    first_start = args.save is not None and os.path.abspath(args.save) == os.path.abspath(folder)
    if args.exit_on_missing_checkpoint or not first_start:
        raise CheckpointError(
            f"{flag} {folder}: there is no checkpoint; drop {flag} to start from random weights "
            "(only where --save names the same folder is an empty one taken as a first start)"
        )


def is_there(folder: str) -> bool:
    """Whether a folder has a tracker file."""
    return os.path.isfile(os.path.join(folder, _NAME))


def newest_step(folder: str) -> float | None:
    """Returns the step that a folder's tracker file names, infinity for `release`; None: no file.

    Raises:
        CheckpointError: the file holds something else.
    """
    if not is_there(folder):
        return None
    path = os.path.join(folder, _NAME)
    check(path)
    with open(path, encoding="utf-8") as file:
        text = file.read().strip()
    return math.inf if text == "release" else int(text)


def newest_checkpoint(folder: str, step: int | None = None) -> str | None:
    """Returns the path of the checkpoint of `step`, or of the one that the tracker file names.

    None if there is no tracker file here.
    """
    if step is None:
        try:
            with open(os.path.join(folder, _NAME), encoding="utf-8") as file:
                text = file.read().strip()
        except FileNotFoundError:
            return None
        if text == "release":
            return os.path.join(folder, text)
        step = int(text)
    return os.path.join(folder, f"iter_{step:07d}")


def _checkpoints(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if _ITERATION.fullmatch(name))


def _found(folder: str) -> str:
    found = _checkpoints(folder)
    return f"found here: {', '.join(found[-3:])}" if found else "no iter_* folder is here"
