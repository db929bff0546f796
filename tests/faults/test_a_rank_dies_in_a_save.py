"""A rank is gone before it has told what it wrote: the others do not wait for it for ever."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_resilient.checkpoint import directory as places
from megatron_resilient.telemetry import EVENTS_FILE
from tests.support.pretrain_pool import TINY, flags, free_port
from tests.support.processes import until
from tests.support.telemetry import events_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_moe.py"
RUN = TINY | {
    "expert_model_parallel_size": 2,
    "train_iters": 10_000,
    "save_interval": 3,
    "resilient_checkpoint_format": "experts",
}


def writer_of(process: subprocess.Popen) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        if any("writer_process" in word for word in child.cmdline()):
            return child
    return None


def test_rank_0_ends_by_itself(tmp_path):
    """Without a launcher that would kill it."""
    save = tmp_path / "save"
    common = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    argv = [sys.executable, str(SCRIPT), *flags(**RUN, save=save)]
    ranks, logs = [], []
    try:
        for rank in range(2):
            logs.append((tmp_path / f"rank{rank}.log").open("w+"))
            ranks.append(
                subprocess.Popen(
                    argv,
                    cwd=tmp_path,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=logs[rank],
                    stderr=subprocess.STDOUT,
                )
            )
        until(lambda: writer_of(ranks[1]) is not None, 90)
        os.kill(writer_of(ranks[1]).pid, signal.SIGSTOP)
        until(
            lambda: (save / EVENTS_FILE).is_file() and events_of(save, "checkpoint_save_start"),
            90,
        )
        ranks[1].kill()
        assert ranks[0].wait(60) != 0
        assert places.manifests(save) == []
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for log in logs:
            log.close()
