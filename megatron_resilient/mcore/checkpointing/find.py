"""Which checkpoint Megatron's --load means where both formats may be in a folder."""

import argparse
from pathlib import Path

from megatron_resilient.checkpoint.directory import manifests
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore import tracker_file

_SHOWN = 5


def folder_of_ours(args: argparse.Namespace) -> Path | None:
    """Returns the folder whose per-expert checkpoint is to be loaded; None: Megatron's is, or none.

    The newer of the two formats' newest checkpoints is meant, or the one of --ckpt-step. As in
    Megatron, --pretrained-checkpoint counts where the folder of --load has none, and is finetuned:
    `args.finetune` is set then.

    Raises:
        CheckpointError: neither format has the checkpoint of --ckpt-step.
    """
    for name in ("load", "pretrained_checkpoint"):
        folder = getattr(args, name, None)
        if folder is None or "://" in folder:
            continue
        steps = manifests(Path(folder))
        if not steps and not tracker_file.is_there(folder):
            continue
        if not steps:
            return None  # what its tracker file says is Megatron's business
        if name == "pretrained_checkpoint":
            args.finetune = True
        stock = tracker_file.newest_step(folder)
        if args.ckpt_step is None:
            return Path(folder) if stock is None or steps[0] >= stock else None
        if args.ckpt_step in steps:
            return Path(folder)
        if Path(folder, f"iter_{args.ckpt_step:07d}").is_dir():
            return None
        shown = ", ".join(map(str, steps[:_SHOWN])) + (", ..." if len(steps) > _SHOWN else "")
        raise CheckpointError(
            f"--ckpt-step {args.ckpt_step}: {folder} has no checkpoint of that step; there are: "
            f"{shown}"
        )
    return None
