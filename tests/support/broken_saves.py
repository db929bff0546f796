"""Breaks the saves of some steps on one rank of a pool."""

import os
import shutil
import signal
import time

from megatron_resilient.checkpoint.writer import Writer

_write = Writer.write


def break_saves(rank, how):
    """From now on: `gone` removes the folder before it is written, `killed` kills the worker.

    Args:
        rank: on which it happens.
        how: {number of the job, counted from 1: what happens}, with numbers as text.
    """

    def write(self, job):
        what = how.get(str(job.job)) if int(os.environ["RANK"]) == rank else None
        if what == "gone":
            shutil.rmtree((job.root / job.files[0].path).parent)
        if what != "killed":
            _write(self, job)
            return
        _until(lambda: self.pid is not None)
        os.kill(self.pid, signal.SIGSTOP)  # else it may be done before it is killed
        _write(self, job)
        _until(lambda: self._worker.has_job)
        os.kill(self.pid, signal.SIGKILL)

    Writer.write = write


def _until(is_so):
    while not is_so():
        time.sleep(0.001)


def mend_saves():
    """Undoes it."""
    Writer.write = _write
