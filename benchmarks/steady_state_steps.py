"""The training script of steady_state.py: an elastic run that is not elastic in every other block.

A block is some steps with everything that makes a rank recoverable, or without: the agreement, the
copies of buffers and random streams, the mirror, the fenced waits, the report to the agent, and the
watchdog thread with its heartbeats and samples of the stack. Blocks take turns in the same
processes, so what else the machine does strikes both alike.

Each rank writes `steps-<rank>.json` into the run folder.
"""

import functools
import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BLOCK_STEPS = 5
WARMUP_STEPS = 10
_PARKED_SECONDS = 3600.0
_PROBES = 200


def is_on(step):
    """Whether a step, from 0, is recoverable: off on on off off on on ..."""
    return (step - WARMUP_STEPS) // BLOCK_STEPS % 4 in (1, 2)


def is_first_of_block(step):
    """Whether it is a block's first step, in which the other mode begins."""
    return (step - WARMUP_STEPS) % BLOCK_STEPS == 0


class Switch:
    """Takes the elastic part out of this process, and puts it in again."""

    def __init__(self, session):
        from megatron_resilient.elastic import fenced_wait, member
        from megatron_resilient.mcore.recovery import session as session_module

        self._module, self._session, self._live = session_module, session, session.live
        self._member_module, self._member = member, session.member
        self._sample_seconds = member._SAMPLE_SECONDS
        self._fenced_wait = fenced_wait
        self._steps_off = 0
        self.is_on = True
        self.parts = defaultdict(float)  # CPU seconds of the main thread, by part
        self.waits = 0
        for owner, name, part in (
            (self._live, "begin_step", "copies of buffers and random streams"),
            (self._live, "_agree", "agreement"),
            (self._live._mirror, "send_gradients", "mirror: gradients"),
            (self._live._mirror, "update", "mirror: update"),
            (self._member, "report", "report"),
        ):
            if owner is not None:
                setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function, part):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] += time.thread_time() - start

        return timed

    def watchdog_seconds(self):
        """Returns the processor time that the watchdog thread has had."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._member._watchdog.ident))

    def turn(self, on):
        """Turns it on or off; the same on all ranks in the same step."""
        if on == self.is_on:
            return
        self.is_on = on
        optimizer, live = self._live.optimizer, self._live
        if on:
            self._module._session = self._session
            optimizer.step_with_ready_grads = live._agree_and_update
            optimizer.step = live._step_or_skip
            self.install_waits()
            # Megatron went on meanwhile. Samples are not looked at: nobody will be lost.
            live.progress = replace(live.progress, step=live.progress.step + self._steps_off)
            self._steps_off = 0
            self._member_module._SAMPLE_SECONDS = self._sample_seconds
            self._member._link.wake()
        else:
            self._module._session = None
            # The instance's methods hide those of its class.
            del optimizer.step_with_ready_grads, optimizer.step
            self._fenced_wait.uninstall()
            self._member_module._SAMPLE_SECONDS = _PARKED_SECONDS

    def install_waits(self):
        """Has waits look at the fence again."""
        self._fenced_wait.install(self._member.check, self._note_wait)

    def note_step(self):
        """To be called after each step."""
        self._steps_off += not self.is_on

    def wait_seconds(self):
        """Returns how much longer a wait for work that is done takes with the fence than without.

        Collective over all ranks.
        """
        seconds = {True: 0.0, False: 0.0}
        for number in range(2 * _PROBES):
            fenced = bool(number % 2)
            if fenced:
                self.install_waits()
            else:
                self._fenced_wait.uninstall()
            seconds[fenced] += _wait_once()
        self.install_waits()
        return (seconds[True] - seconds[False]) / _PROBES

    def _note_wait(self):
        self._member.progress += 1
        self.waits += 1


def _wait_once():
    import torch

    work = torch.distributed.all_reduce(torch.zeros(1), async_op=True)
    while not work.is_completed():
        time.sleep(0)
    start = time.thread_time()
    work.wait()
    return time.thread_time() - start


class Recorder:
    """Wraps Megatron's train_step from outside."""

    def __init__(self, training):
        self._inner = training.train_step
        training.train_step = self
        self._switch = None
        self._step = 0
        self._watchdog = 0.0
        self.answer = {"end_seconds": [], "end_cpu_seconds": []}

    def __call__(self, *args, **kwargs):
        """Runs a step in the mode of its block."""
        from megatron_resilient.mcore.recovery import session

        if self._step == WARMUP_STEPS:
            self._switch = Switch(session.current())
        switch = self._switch
        if switch is not None and is_first_of_block(self._step):
            if switch.is_on and self._step > WARMUP_STEPS:
                self._watchdog += switch.watchdog_seconds() - self._watchdog_from
            switch.turn(is_on(self._step))
            self._watchdog_from = switch.watchdog_seconds()
        result = self._inner(*args, **kwargs)
        if switch is not None:
            switch.note_step()
        self._step += 1
        self.answer["end_seconds"].append(time.perf_counter())
        self.answer["end_cpu_seconds"].append(time.process_time())
        return result

    def write(self):
        """Writes what was measured. Collective over all ranks."""
        import torch
        from megatron.training import get_args

        steps_on = sum(map(is_on, range(WARMUP_STEPS, self._step)))
        switch = self._switch
        switch.turn(True)
        parts = {name: seconds / steps_on for name, seconds in switch.parts.items()}
        waits = switch.waits / steps_on
        parts["fenced waits"] = waits * switch.wait_seconds()
        parts["watchdog: heartbeat, samples"] = self._watchdog / steps_on
        torch.distributed.barrier()
        self.answer |= {"parts": parts, "waits": waits, "pid": os.getpid()}
        rank = torch.distributed.get_rank()
        path = Path(get_args().resilient_run_dir) / f"steps-{rank}.json"
        path.write_text(json.dumps(self.answer))


def main():
    """Trains as the example does."""
    import megatron_resilient

    spec = importlib.util.spec_from_file_location(
        "pretrain_moe", ROOT / "examples" / "pretrain_moe.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    from megatron.training import training

    recorder = Recorder(training)

    def train():
        example.main()
        recorder.write()

    megatron_resilient.run(train)


if __name__ == "__main__":
    main()
