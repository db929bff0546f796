"""One rank of a `PretrainPool`: runs examples/pretrain_moe.py again and again in one process.

Reads a case as a JSON line on stdin, answers with a JSON line on the descriptor given as argument.
"""

import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Recorder:
    """Wraps Megatron's train_step from outside, the same way for stock and for the plugin."""

    def __init__(self, training):
        self._training = training
        self._inner = training.train_step
        training.train_step = self
        self.losses, self.grad_norms, self.model = [], [], None

    def __call__(self, *args, **kwargs):
        self.model = args[2]
        result = self._inner(*args, **kwargs)
        if "lm loss" in result[0]:
            self.losses.append(float(result[0]["lm loss"]).hex())
        self.grad_norms.append(float(result[5]).hex())
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
        # Stock exits here for want of a Makefile; that defect has a test of its own.
        from megatron.training import initialize

        initialize._compile_dependencies = lambda: None
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "pretrain_moe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_case(script, case, rank):
    import torch
    from megatron.training import training

    from megatron_resilient.mcore.reset import reset_megatron

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(case["port"]),
    )
    sys.argv = ["pretrain_moe.py", *case["argv"]]
    recorder = Recorder(training)
    answer = {}
    try:
        script.main()
    except SystemExit as stop:
        answer["exit"] = stop.code
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["traceback"] = traceback.format_exc()
    finally:
        recorder.remove()
    answer.update(losses=recorder.losses, grad_norms=recorder.grad_norms)
    if case.get("digest") and recorder.model is not None:
        answer["parameters"] = float(
            sum(p.detach().double().abs().sum() for c in recorder.model for p in c.parameters())
        ).hex()
    if torch.distributed.is_initialized() and "error" not in answer:
        torch.distributed.barrier()
    reset_megatron(recorder.model or ())
    return answer


def main():
    rank, reply, plugin_on = int(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w"), sys.argv[3] == "on"
    warnings.simplefilter("ignore")
    script = load_script("pretrain_moe_under_test", plugin_on)
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for line in sys.stdin:
        answer = run_case(script, json.loads(line), rank)
        print(json.dumps(answer), file=reply, flush=True)


if __name__ == "__main__":
    main()
