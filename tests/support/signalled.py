"""Sends a signal to a rank of a pool at a point of its training."""

import os

from megatron_resilient.mcore import train_hooks

_originals = {}


def signal_at(rank, hook, call, number):
    """From now on: the signal comes when a hook of training is called for the so-manyeth time.

    Args:
        rank: that gets it.
        hook: setup, train_step, evaluate or save_checkpoint.
        call: counted from 1.
        number: of the signal.
    """
    original = _originals.setdefault(hook, getattr(train_hooks, hook))
    calls = []

    def hooked(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(train_hooks, hook, hooked)


def no_signals():
    """Undoes it."""
    for hook, original in _originals.items():
        setattr(train_hooks, hook, original)
