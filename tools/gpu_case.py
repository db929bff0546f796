"""One training run of gpu_check.py: examples/pretrain_moe.py on one device, timed from outside.

    python gpu_case.py on|off cuda|cpu RESULT.json FLAGS...

`off` is stock Megatron; on the CPU, where stock does not run, the patch group `cpu` is in force.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_moe.py"


class Steps:
    """Stands for Megatron's `train_step` and notes losses and times, whoever else wraps it."""

    def __init__(self, training: ModuleType, device: str) -> None:
        self._inner = training.train_step
        self._device = device
        self.losses: list[float] = []
        self.seconds: list[float] = []
        training.train_step = self

    def __call__(self, *args, **kwargs):
        """Runs one step."""
        self._wait()
        start = time.perf_counter()
        result = self._inner(*args, **kwargs)
        self._wait()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(result[0]["lm loss"]))
        return result

    def _wait(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()


def load_script(plugin: bool, device: str) -> ModuleType:
    """Imports the training script; its own enable() does nothing if the plugin is to be off."""
    import megatron_resilient
    from megatron_resilient.patching import apply

    if not plugin:
        if device == "cpu":
            apply.enable(("cpu",))
        megatron_resilient.enable = lambda: None
        # Stock runs `make` here, for which the wheel has no Makefile; what it would make is there.
        from megatron.training import initialize

        initialize._compile_dependencies = lambda: None
    spec = importlib.util.spec_from_file_location("pretrain_moe", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def main() -> None:
    """Trains, then writes what was seen as one JSON document."""
    plugin, device, result, *flags = sys.argv[1:]
    sys.argv = [str(SCRIPT), *flags]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    # Port 0: any that is free; nobody else has to know it.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    script = load_script(plugin == "on", device)

    import torch
    from megatron.training import training

    import megatron_resilient
    from megatron_resilient.patching import apply

    steps = Steps(training, device)
    megatron_resilient.run(script.main)
    seen = {
        "losses": steps.losses,
        "step_seconds": steps.seconds,
        "groups": apply.enabled_groups(),
        "device_name": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
    Path(result).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
