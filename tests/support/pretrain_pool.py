"""Real `pretrain()` runs on several gloo ranks, many per launch: importing Megatron is what costs.

A case gets its own process group, model, data and run; the processes stay.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A model that four ranks train at four steps a second on two cores.
SMALL_MODEL = {
    "num-layers": 4,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 10,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-iters": 100,
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 512,
    "num-experts": 8,
    "moe-router-topk": 2,
    "moe-token-dispatcher-type": "alltoall",
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 1e-2,
    "log-interval": 100,
    "eval-iters": 0,
    "eval-interval": 1000,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "split": "100,0,0",
    "attention-dropout": 0,
    "hidden-dropout": 0,
}


def flags(**changes) -> list[str]:
    """Returns the small model's command line with `changes`; None or False removes a flag."""
    merged = SMALL_MODEL | {name.replace("_", "-"): value for name, value in changes.items()}
    argv = []
    for name, value in merged.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is not True:
            argv += [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    return argv


@dataclass
class Result:
    """What one case did, rank by rank."""

    answers: list[dict]
    output: str = field(repr=False, default="")

    @property
    def losses(self) -> list[float]:
        """Losses of the steps, from the last rank (the last pipeline stage)."""
        return [float.fromhex(x) for x in self.answers[-1]["losses"]]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norms of the steps."""
        return [float.fromhex(x) for x in self.answers[-1]["grad_norms"]]

    @property
    def failed(self) -> dict | None:
        """The answer of the rank that failed first, None if none did.

        Ranks that only noticed that a peer was gone come last.
        """
        failures = [answer for answer in self.answers if "error" in answer]
        return min(failures, key=lambda a: "Connection" in a["error"], default=None)

    @property
    def error(self) -> str | None:
        """The error of the rank that failed first, None if none did."""
        return self.failed["error"] if self.failed else None

    def ok(self) -> "Result":
        """Returns itself; fails the test with the traceback if a rank raised."""
        assert self.failed is None, self.failed["traceback"]
        return self


class PretrainPool:
    """`world` processes that run cases one after the other; a context manager."""

    def __init__(self, world: int, plugin: bool = True, log_dir: Path | None = None):
        self._workers, self._replies, self._logs = [], [], []
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        }
        for rank in range(world):
            read, write = os.pipe()
            log = open(log_dir / f"rank{rank}.log", "w") if log_dir else subprocess.DEVNULL
            self._workers.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.support.pretrain_worker",
                        str(rank),
                        str(write),
                        "on" if plugin else "off",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[write],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                )
            )
            os.close(write)
            self._replies.append(os.fdopen(read))
            self._logs.append(log)
        self._collect(world, timeout_seconds=180)

    def run(
        self, world: int | None = None, timeout_seconds: float = 120, digest=False, **changes
    ) -> Result:
        """Runs the small model with `changes` of its flags on the first `world` ranks."""
        return self.run_argv(flags(**changes), world, timeout_seconds, digest)

    def run_argv(
        self, argv: list[str], world: int | None = None, timeout_seconds: float = 120, digest=False
    ) -> Result:
        """Runs one command line on the first `world` ranks (default: all)."""
        world = world or len(self._workers)
        case = json.dumps({"argv": argv, "world": world, "port": free_port(), "digest": digest})
        for worker in self._workers[:world]:
            worker.stdin.write(case + "\n")
            worker.stdin.flush()
        return Result(self._collect(world, timeout_seconds))

    def _collect(self, world: int, timeout_seconds: float) -> list[dict]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank in range(world):
                selector.register(self._replies[rank], selectors.EVENT_READ, rank)
            while len(answers) < world:
                ready = selector.select(timeout=max(0, deadline - time.monotonic()))
                if not ready:
                    self.close()
                    missing = sorted(set(range(world)) - set(answers))
                    raise TimeoutError(
                        f"ranks {missing} did not answer within {timeout_seconds} s; "
                        f"answers so far: {answers}"
                    )
                for key, _ in ready:
                    line = key.fileobj.readline()
                    if not line:
                        self.close()
                        raise RuntimeError(f"rank {key.data} died; answers so far: {answers}")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """Ends the processes that this pool started, and no others."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
        for worker in self._workers:
            worker.stdin.close()
            worker.wait()
        for stream in (*self._replies, *(log for log in self._logs if hasattr(log, "close"))):
            stream.close()

    def __enter__(self) -> "PretrainPool":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
