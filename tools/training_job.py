"""A job on this machine: start it, follow its events, kill a node or all of it by pid."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from megatron_resilient.telemetry import EVENTS_FILE, Event, read_events

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_moe.py"
POLL_SECONDS = 0.25
REJOIN_SECONDS = 2


class TrainingJob:
    """A training script on several ranks; a context manager that leaves none behind.

    Attributes:
        log: what the ranks print, after the command line that started them.
    """

    def __init__(
        self,
        ranks: int,
        flags: Sequence[str],
        run_dir: Path,
        log: Path,
        launcher: Sequence[str] | None = None,
        script: Path | None = None,
    ) -> None:
        """Starts the job.

        Args:
            ranks: processes, all on the CPU.
            flags: of the script; the run folder and the device are added.
            run_dir: the job appends its events there.
            log: file for what the ranks print; an older one is replaced.
            launcher: program and arguments that start `ranks` processes of a script whose path and
                flags follow; default: `emulated`, with one node a rank.
            script: what the ranks run; default: examples/pretrain_moe.py.

        Raises:
            OSError: no process can be started, or the log cannot be written.
        """
        self.log = log
        self._run_dir = run_dir
        self._seen = len(self._events())
        command = [
            *(launcher or emulated(ranks)),
            *(str(script or SCRIPT), *flags),
            *("--resilient-device", "cpu", "--resilient-run-dir", str(run_dir)),
        ]
        with log.open("w", encoding="utf-8") as output:
            output.write(shlex.join(command) + "\n\n")
            output.flush()
            # A session of its own: Ctrl-C in the terminal reaches us only, and we end the job.
            self._launcher = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment(),
                start_new_session=True,
            )

    def follow(self) -> Iterator[Event]:
        """Yields the job's events as they are written, until it has ended.

        Raises:
            TelemetryError: a damaged line.
        """
        ended = False
        while not ended:
            # Asked before reading: what was written until the end is read in the last round.
            ended = self.exit_code is not None
            events = self._events()
            yield from events[self._seen :]
            self._seen = len(events)
            if not ended:
                time.sleep(POLL_SECONDS)

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return int(self._launcher.pid)

    @property
    def exit_code(self) -> int | None:
        """Of the launcher: 0 if all ranks ended well, None while it runs."""
        return self._launcher.poll()

    def kill_node(self, node: str) -> None:
        """Kills a node's agent with SIGKILL; its training process dies with it.

        Raises:
            LookupError: the log names no agent of that node.
        """
        started = re.compile(rf"\[{node}\] agent (\d+) started workers")
        agents = started.findall(self.log.read_text(encoding="utf-8", errors="replace"))
        if not agents:
            raise LookupError(f"{self.log}: no agent of {node}")
        psutil.Process(int(agents[-1])).kill()

    def kill(self) -> int:
        """Kills all of the job with SIGKILL.

        Returns:
            How many nodes were alive; with torchrun, ranks.
        """
        if self.exit_code is not None:
            return 0
        # Stopped first, so that it starts none while we count them.
        self._launcher.suspend()
        children = self._launcher.children()
        # Of a job of nodes, its coordinator is a child too: the one without children.
        alive = [child for child in children if child.children()] or children
        processes = [self._launcher, *self._launcher.children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)
        return len(alive)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def _events(self) -> list[Event]:
        return read_events(self._run_dir) if (self._run_dir / EVENTS_FILE).exists() else []


def emulated(nodes: int, *options: str) -> list[str]:
    """Returns the command line of an elastic job on emulated nodes, with one rank each.

    A node that is killed comes back after REJOIN_SECONDS.
    """
    return [
        *(sys.executable, "-m", "megatron_resilient.cli", "run", "--emulate-nodes", str(nodes)),
        *("--rejoin-after", str(REJOIN_SECONDS), "--join-window", "1", "--max-restarts", "0"),
        *options,
    ]


def torchrun(ranks: int, *options: str) -> list[str]:
    """Returns the command line of torchrun for `ranks` processes on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks), *options),
    ]


def environment() -> dict[str, str]:
    """Returns the variables that ranks of this machine need."""
    return {
        "OMP_NUM_THREADS": "1",  # the ranks share the cores
        "GLOO_SOCKET_IFNAME": "lo",  # the host's name may not resolve, and need not
        "CUDA_VISIBLE_DEVICES": "",
        # Missing Transformer Engine and Apex are named once per rank and module.
        "PYTHONWARNINGS": "ignore::UserWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
