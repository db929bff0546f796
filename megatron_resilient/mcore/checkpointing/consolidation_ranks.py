"""The processes that consolidate a checkpoint: one that imports Megatron, and its forks.

Run as `python -m` with the job as JSON. The fresh process imports once, and no thread runs before
it forks the ranks; each dies with it, and it with the command that started it.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_resilient.checkpoint.manifest import Manifest
from megatron_resilient.elastic import child
from megatron_resilient.elastic.launcher import LOOPBACK, free_port
from megatron_resilient.errors import CheckpointError, ResilientError

_TICK_SECONDS = 0.05
ANSWER = "answer.json"  # of each rank: answer.json.RANK


INSTEAD = (
    "give the run one more start with --load on this folder, another --save folder and "
    "--resilient-checkpoint-format torch_dist, where it can run"
)


class ConsolidationError(CheckpointError):
    """A checkpoint of which no torch_dist one can be made here."""


def ranks_of(model: Mapping[str, Any]) -> int:
    """Returns how many processes it takes to hold a model.

    Args:
        model: of a manifest.
    """
    tensor = int(model["tensor_model_parallel_size"])
    expert_tensor = int(model["expert_tensor_parallel_size"] or tensor)
    return math.lcm(tensor, expert_tensor) * int(model["pipeline_model_parallel_size"])


def flags_of(manifest: Manifest) -> dict[str, Any]:
    """Returns the flags of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the manifest does not have them.
    """
    flags: dict[str, Any] = manifest.state.get("flags") or {}
    if not flags:
        raise CheckpointError(
            f"the manifest of step {manifest.step} does not say the flags of its run: {INSTEAD}"
        )
    return flags


def run(job: dict[str, Any], ranks: int, folder: Path, timeout_seconds: float) -> dict[str, Any]:
    """Consolidates in processes of its own.

    Args:
        job: arguments of `consolidation.consolidate`.
        ranks: processes.
        folder: for their answers and what they print.
        timeout_seconds: after it they are killed.

    Returns:
        What `consolidate` returns.

    Raises:
        ConsolidationError: it failed; says why, or what was printed last.
    """
    log = folder / "log"
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    text = json.dumps({"job": job, "ranks": ranks, "folder": str(folder)})
    command = [sys.executable, "-m", __name__, text]
    with log.open("w") as output:
        pid = child.fork(
            lambda: child.execute(command, environment),
            stdout=output.fileno(),
            stderr=output.fileno(),
        )
    status = None
    deadline = time.monotonic() + timeout_seconds
    try:
        while (status := child.poll(pid)) is None:
            if time.monotonic() > deadline:
                raise ConsolidationError(f"it was not done within {timeout_seconds:g} seconds")
            time.sleep(_TICK_SECONDS)
    finally:
        if status is None:
            child.kill(pid)
            os.waitpid(pid, 0)
    answers = [_answer(folder, rank) for rank in range(ranks)]
    for answer in answers:
        if answer is not None and "error" in answer:
            raise ConsolidationError(answer["error"])
    if status or answers[0] is None:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        raise ConsolidationError(f"a process of Megatron's ended with {status}: {last}")
    return dict(answers[0])


def _answer(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        return dict(json.loads((folder / f"{ANSWER}.{rank}").read_text()))
    except FileNotFoundError:
        return None


def _main(text: str) -> int:
    told = json.loads(text)
    from megatron_resilient.mcore.preload import preload

    preload()
    waiting = {}
    for rank in range(told["ranks"]):

        def body(rank: int = rank) -> None:
            child.call(lambda: _rank(rank, told["job"], Path(told["folder"])))

        waiting[child.fork(body)] = rank  # type: ignore[arg-type]
    while waiting:
        for pid in list(waiting):
            status = child.poll(pid)
            if status is None:
                continue
            del waiting[pid]
            if status:  # the others would wait for it
                for other in waiting:
                    child.kill(other)
                return 1
        time.sleep(_TICK_SECONDS)
    return 0


def _rank(rank: int, job: dict[str, Any], folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from megatron_resilient.mcore.checkpointing.consolidation import consolidate

    failed = False
    try:
        answer = consolidate(**job)
    except ResilientError as error:
        failed, answer = True, {"error": str(error)}
    staged = folder / f"{ANSWER}.{rank}.tmp"
    staged.write_text(json.dumps(answer))
    staged.rename(folder / f"{ANSWER}.{rank}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
