"""`checkpoint consolidate`: one torch_dist checkpoint, as stock Megatron loads it."""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from megatron_resilient.checkpoint.manifest import Manifest

_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the action."""
    parser.add_argument(
        "output", type=Path, metavar="OUT", help="a new or an empty folder, for --load"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest whole)")
    parser.add_argument(
        "--timeout-minutes", type=float, default=120.0, help="then it is given up (default: 120)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 1 when the checkpoint cannot be made, else 0."""
    from megatron_resilient.checkpoint.staged_folder import check_free, staged_folder
    from megatron_resilient.mcore.checkpointing import consolidation_ranks as ranks

    manifest = _manifest(args.directory, args.step)
    ranks.flags_of(manifest)
    check_free(args.output)
    job = {
        "directory": str(args.directory.absolute()),
        "step": manifest.step,
        "newest": args.step is None,
    }
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with (
            staged_folder(args.output.absolute()) as folder,
            tempfile.TemporaryDirectory(prefix="consolidate-") as answers,
        ):
            found = ranks.run(
                {**job, "folder": str(folder)},
                ranks.ranks_of(manifest.model),
                Path(answers),
                60 * args.timeout_minutes,
            )
    except ranks.ConsolidationError as error:
        if args.debug:
            raise
        print(f"megatron-resilient checkpoint: {args.directory}: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    _say(args, found)
    return 0


def _manifest(directory: Path, step: int | None) -> "Manifest":
    """Returns the manifest that tells how to build the model.

    Raises:
        CheckpointError: there is none that can be read.
    """
    from megatron_resilient.checkpoint import directory as places
    from megatron_resilient.errors import CheckpointError

    if not places.is_ours(directory):
        raise CheckpointError(f"{directory}: is no checkpoint directory of ours")
    steps = places.manifests(directory)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps[:_SHOWN])) or "none"
        raise CheckpointError(f"{directory}: has no checkpoint of step {step}; there are: {there}")
    failed: CheckpointError | None = None
    for each in steps if step is None else [step]:
        try:
            return places.read_manifest(places.manifest_path(directory, each))
        except CheckpointError as error:
            failed = failed or error
    raise failed or CheckpointError(f"{directory}: there is no checkpoint")


def _say(args: argparse.Namespace, found: dict[str, Any]) -> None:
    for line in found["warnings"]:
        print(f"WARNING: {line}", file=sys.stderr)
    if stale := found["stale_experts"]:
        print(
            f"WARNING: {stale} of {found['experts']} experts are of older steps than "
            f"{found['step']}, the oldest of step {found['oldest_step']}: their updates since then "
            f"are not in {args.output}",
            file=sys.stderr,
        )
    if args.json:
        document = {"directory": str(args.directory), "output": str(args.output), **found}
        print(json.dumps(document, indent=2))
        return
    kinds = " and ".join(found["loads_into"])
    print(f"{args.output}: step {found['step']}, for --load; optimizers: {kinds}")


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # what was begun is taken away on the way out
