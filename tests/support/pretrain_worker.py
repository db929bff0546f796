"""One rank of a `PretrainPool`: runs examples/pretrain_moe.py again and again in one process.

Reads a case as a JSON line on stdin, answers with a JSON line on the descriptor given as argument.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Recorder:
    """Wraps Megatron's train_step from outside, the same way for stock and for the plugin."""

    def __init__(self, training):
        self._training = training
        self._inner = training.train_step
        training.train_step = self
        self.losses, self.grad_norms, self.model, self.optimizer = [], [], None, None
        # At the end of each step: this process's clock, and the processor time it has had.
        self.end_seconds, self.end_cpu_seconds = [], []

    def __call__(self, *args, **kwargs):
        self.model, self.optimizer = args[2], args[3]
        result = self._inner(*args, **kwargs)
        if "lm loss" in result[0]:
            self.losses.append(float(result[0]["lm loss"]).hex())
        # None where fp16 overflowed and the step was skipped.
        self.grad_norms.append(float("nan" if result[5] is None else result[5]).hex())
        self.end_seconds.append(time.perf_counter())
        self.end_cpu_seconds.append(time.process_time())
        return result

    def remove(self):
        self._training.train_step = self._inner


def load_script(name, plugin_on):
    """Imports the example under `name`; without the plugin its enable() is the CPU group alone."""
    import megatron_resilient
    from megatron_resilient.patching import apply

    if not plugin_on:
        apply.disable()
        apply.enable(("cpu",))
        megatron_resilient.enable = lambda: None
        # Parsing is the same with it, and half of what a case costs without.
        from megatron.training.argument_utils import ArgumentGroupFactory

        from patches.training_argument_utils import PATCHES

        keeping = PATCHES[0].make(ArgumentGroupFactory._get_field_docstrings)
        ArgumentGroupFactory._get_field_docstrings = keeping
        # Stock exits here for want of a Makefile; that defect has a test of its own.
        from megatron.training import initialize

        initialize._compile_dependencies = lambda: None
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "pretrain_moe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def left_out(ids):
    """Has every patch in force but those of `ids`."""
    from megatron_resilient.patching import apply

    if not ids:
        yield
        return
    groups, whole = apply.enabled_groups(), apply.default_registry()
    assert set(ids) <= set(whole.by_id), f"no such patches: {set(ids) - set(whole.by_id)}"
    rest = tuple(
        replace(patch, after=tuple(name for name in patch.after if name not in ids))
        for patch in whole.patches
        if patch.id not in ids
    )
    apply.disable()
    apply.enable(groups, registry=type(whole)(rest, whole.reliances))
    try:
        yield
    finally:
        apply.disable()
        apply.enable(groups)


def function(name):
    """Returns the function that `package.module:function` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_case(script, case):
    import torch
    from megatron.training import training

    import megatron_resilient
    from megatron_resilient.mcore.reset import reset_megatron

    sys.argv = ["pretrain_moe.py", *case["argv"]]
    recorder = Recorder(training)
    answer = {}
    try:
        if case["as_script"]:
            megatron_resilient.run(script.main)
        else:
            script.main()
        if case["inspect"]:
            answer["inspected"] = function(case["inspect"])(recorder.model, recorder.optimizer)
    except SystemExit as stop:
        answer["exit"] = stop.code
    except BaseException as error:  # torch's CheckpointException is no Exception
        answer.update(described(error))
    finally:
        recorder.remove()
    answer.update(
        losses=recorder.losses,
        grad_norms=recorder.grad_norms,
        end_seconds=recorder.end_seconds,
        end_cpu_seconds=recorder.end_cpu_seconds,
    )
    if case["digest"] and recorder.model is not None:
        answer["parameters"] = float(
            sum(p.detach().double().abs().sum() for c in recorder.model for p in c.parameters())
        ).hex()
    if torch.distributed.is_initialized() and not {"error", "exit"} & answer.keys():
        torch.distributed.barrier()
    reset_megatron(recorder.model or ())
    return answer


def run_call(case):
    """Calls one function of the tests, without a training run."""
    try:
        return {"returned": function(case["call"])(**case["arguments"])}
    except Exception as error:
        return described(error)


def described(error):
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exc(),
    }


def main():
    # A pool that is killed takes its workers with it, also those that are busy.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    rank, reply, plugin_on = int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w"), sys.argv[3] == "on"
    warnings.simplefilter("ignore")
    script = load_script("pretrain_moe_under_test", plugin_on)
    # Modules are there for good: no collection between two cases need walk them.
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(case["world"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(case["port"]),
        )
        with left_out(case["without"]):
            answer = run_call(case) if "call" in case else run_case(script, case)
        sys.stdout.flush()
        sys.stderr.flush()
        print(json.dumps(answer), file=reply, flush=True)


if __name__ == "__main__":
    main()
