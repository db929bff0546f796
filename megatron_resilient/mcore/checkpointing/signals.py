"""Signals that ask for a checkpoint and the end: Megatron's handler, for several of them."""

import signal
from types import FrameType

from megatron.training import get_args
from megatron.training.global_vars import get_signal_handler

# What schedulers send before they take a machine away: Slurm, Kubernetes and spot agents SIGTERM,
# `sbatch --signal=USR1@120` the other.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def listen() -> None:
    """Has each of them end the run after the step, evaluation or save in progress, with a save.

    Megatron asks for its flag after every step, on all ranks together.
    """
    if not get_args().exit_signal_handler:
        return
    handler = get_signal_handler()

    def note(number: int, frame: FrameType | None) -> None:
        handler._signal_received = True

    for number in SIGNALS:
        if number != handler.sig:
            signal.signal(number, note)
