"""Real `pretrain()` runs on several gloo ranks, many per launch: importing Megatron is what costs.

A case gets its own process group, model, data and run; the processes stay.
"""

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
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

# The least that still has two pipeline stages, eight experts and two tensor-parallel halves.
TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": 4,
}

# What the plugin makes the default on a CPU and stock has to be told.
CPU_FLAGS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "no_persist_layer_norm": True,
    "no_masked_softmax_fusion": True,
    "no_gradient_accumulation_fusion": True,
    "no_bias_swiglu_fusion": True,
    "no_rope_fusion": True,
    "num_workers": 0,
    "async_strategy": "mcore",
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
    """What one case did, rank by rank.

    Attributes:
        answers: one per rank; what `pretrain_worker` wrote.
        outputs: stdout and stderr of each rank during the case.
    """

    answers: list[dict]
    outputs: list[str] = field(repr=False)

    @property
    def losses(self) -> list[float]:
        """Losses of the steps, from the last rank (the last pipeline stage)."""
        return [float.fromhex(x) for x in self.answers[-1]["losses"]]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norms of the steps."""
        return [float.fromhex(x) for x in self.answers[-1]["grad_norms"]]

    @property
    def numbers(self) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the steps: equal only if two runs are bitwise equal."""
        return list(zip(self.losses, self.grad_norms, strict=True))

    @property
    def inspected(self) -> list:
        """What the `inspect` function returned, by rank."""
        return [answer["inspected"] for answer in self.answers]

    @property
    def exits(self) -> list[int | None]:
        """What each rank passed to sys.exit(), None where it did not call it."""
        return [answer.get("exit") for answer in self.answers]

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
        """Returns itself; fails the test with the traceback if a rank raised or left."""
        assert self.failed is None, self.failed["traceback"]
        assert not any("exit" in answer for answer in self.answers), (self.exits, self.outputs)
        return self


class PretrainPool:
    """`world` processes that run cases one after the other; a context manager.

    Args:
        world: processes.
        plugin: False for stock Megatron with the CPU group of the patches alone.
        log_dir: folder for what the ranks print; default: a temporary one.
    """

    def __init__(self, world: int, plugin: bool = True, log_dir: Path | None = None):
        self._workers, self._replies, self._logs = [], [], []
        self._temporary = None if log_dir else tempfile.TemporaryDirectory(prefix="pretrain-pool-")
        log_dir = log_dir or Path(self._temporary.name)
        self._defaults = {} if plugin else CPU_FLAGS
        self.is_open = True
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # asked for by stock with TP > 1
            "PYTHONPATH": str(ROOT),
        }
        for rank in range(world):
            read, write = os.pipe()
            log = (log_dir / f"rank{rank}.log").open("w+", errors="replace")
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
                    cwd=log_dir,  # where a run without --save leaves its record
                    env=environment,
                    text=True,
                    # A group of its own: what a worker forks can be ended with it.
                    process_group=0,
                )
            )
            os.close(write)
            self._replies.append(os.fdopen(read))
            self._logs.append(log)
        self._collect(world, timeout_seconds=180)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [worker.pid for worker in self._workers]

    def run(self, world: int | None = None, **options) -> Result:
        """Runs the small model on the first `world` ranks.

        Args:
            world: default: all.
            **options: those of `run_argv`; every other name is a change of the model's flags.
        """
        own = {name: options.pop(name) for name in list(options) if name in _CASE_OPTIONS}
        return self.run_argv(flags(**(self._defaults | options)), world, **own)

    def run_argv(
        self,
        argv: list[str],
        world: int | None = None,
        timeout_seconds: float = 120,
        digest: bool = False,
        inspect: str | None = None,
        without: Collection[str] = (),
        as_script: bool = False,
    ) -> Result:
        """Runs one command line on the first `world` ranks (default: all).

        Args:
            argv: flags of examples/pretrain_moe.py.
            world: default: all.
            timeout_seconds: after it the pool is closed and TimeoutError raised.
            digest: whether answers hold a sum over the parameters.
            inspect: `module:function`, called with (model chunks, optimizer) after the last step;
                `Result.inspected` has what it returns.
            without: ids of patches that are not in force during this case.
            as_script: whether errors end the program as they do for a user (`Result.exits`).
        """
        case = {
            "argv": argv,
            "digest": digest,
            "inspect": inspect,
            "without": sorted(without),
            "as_script": as_script,
        }
        return self._ask(case, world, timeout_seconds)

    def call(
        self, function: str, world: int | None = None, timeout_seconds: float = 60, **arguments
    ) -> list:
        """Calls `module:function` on the first `world` ranks; returns what it returns, by rank."""
        case = {"call": function, "arguments": arguments, "without": []}
        return [a["returned"] for a in self._ask(case, world, timeout_seconds).ok().answers]

    def _ask(self, case: dict, world: int | None, timeout_seconds: float) -> Result:
        world = world or len(self._workers)
        starts = [os.fstat(log.fileno()).st_size for log in self._logs[:world]]
        line = json.dumps({**case, "world": world, "port": free_port()})
        for worker in self._workers[:world]:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        answers = self._collect(world, timeout_seconds)
        return Result(answers, [self._logged(rank, start) for rank, start in enumerate(starts)])

    def _logged(self, rank: int, start: int) -> str:
        log = self._logs[rank]
        size = os.fstat(log.fileno()).st_size
        # pread: the worker writes at the position that it shares with this file.
        return os.pread(log.fileno(), size - start, start).decode("utf-8", "replace")

    def _collect(self, world: int, timeout_seconds: float) -> list[dict]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank in range(world):
                selector.register(self._replies[rank], selectors.EVENT_READ, rank)
            while len(answers) < world:
                ready = selector.select(timeout=max(0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(world)) - set(answers))
                    self._give_up(
                        TimeoutError(f"ranks {missing} did not answer within {timeout_seconds} s"),
                        missing,
                        answers,
                    )
                for key, _ in ready:
                    line = key.fileobj.readline()
                    if not line:
                        self._give_up(RuntimeError(f"rank {key.data} died"), [key.data], answers)
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(world)]

    def _give_up(self, error: Exception, ranks: Collection[int], answers: dict) -> None:
        for rank in ranks:
            if self._workers[rank].poll() is None:
                self._workers[rank].send_signal(signal.SIGUSR1)  # it writes its stack
        time.sleep(1)
        error.add_note(f"answers so far: {answers}")
        for rank in ranks:
            error.add_note(f"rank {rank} printed at last:\n{self._logged(rank, 0)[-2000:]}")
        self.close()
        raise error

    def close(self) -> None:
        """Ends the processes that this pool started, and what these forked, and no others."""
        self.is_open = False
        for worker in self._workers:
            if worker.returncode is None:  # not reaped, so the number is still this group's
                os.killpg(worker.pid, signal.SIGKILL)
            worker.stdin.close()
            worker.wait()
        for stream in (*self._replies, *self._logs):
            stream.close()
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> "PretrainPool":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


_CASE_OPTIONS = ("timeout_seconds", "digest", "inspect", "without", "as_script")


def free_port() -> int:
    """Returns a TCP port that was free a moment ago.

    Below those that the system gives to outgoing connections (from 32768 on), which would take it
    again before it is used.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among a hundred tried")
