"""Switches the plugin on and off: which groups of patches a process gets."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from megatron_resilient import error_report
from megatron_resilient.config import DEVICES
from megatron_resilient.errors import ConfigError, ResilientError
from megatron_resilient.patching import apply


def enable(device: str | None = None) -> None:
    """Verifies all patches against the installed Megatron and applies them.

    Call it before the first import of `megatron`: without a GPU some of Megatron's modules cannot
    even be imported as they are.

    Args:
        device: `auto` (the GPU if there is one), `cpu` or `cuda`. Default: what
            `--resilient-device` on the command line says, else `auto`.

    An error that nobody catches ends the script in one line (a drift with its diff), not in a
    traceback.

    Raises:
        PatchDriftError: upstream code is not what the patches were written for; nothing is applied.
        ConfigError: no such device, or Megatron was imported too early.
    """
    try:
        apply.enable(_groups(device))
    except ResilientError:
        # This stands at the top of a script, before anything could catch it.
        error_report.show_uncaught()
        raise


def disable() -> None:
    """Reverts everything that `enable` did; upstream names are the original objects again."""
    apply.disable()


@contextlib.contextmanager
def patched(device: str | None = None) -> Iterator[None]:
    """Has the plugin enabled inside a `with` block, and after it if it was before."""
    with apply.patched(_groups(device)):
        yield


def device_from_command_line(argv: Sequence[str]) -> str:
    """Returns the value of `--resilient-device` in `argv`, `auto` if it is not there.

    Of repeated flags the last one counts, as for the parser. That does not exist yet: patches come
    before the first import.
    """
    device = "auto"
    for i, argument in enumerate(argv):
        if argument == "--resilient-device" and i + 1 < len(argv):
            device = argv[i + 1]
        elif argument.startswith("--resilient-device="):
            device = argument.partition("=")[2]
    return device


def on_cpu() -> bool:
    """Tells whether the CPU backend is active in this process."""
    return "cpu" in apply.enabled_groups()


def _groups(device: str | None) -> tuple[str, ...]:
    device = device or device_from_command_line(sys.argv[1:])
    if device not in DEVICES:
        raise ConfigError(f"--resilient-device {device}: must be one of {', '.join(DEVICES)}")
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            "--resilient-device cuda: torch sees no CUDA device here "
            "(`megatron-resilient doctor` says why)"
        )
    if device == "cuda" or (device == "auto" and has_cuda):
        return ("fixes", "core")
    fusions = sys.modules.get("megatron.core.fusions.fused_bias_swiglu")
    # torch.compile wraps the function; our stand-in leaves it as it is.
    if fusions is not None and hasattr(fusions.swiglu, "__wrapped__"):
        raise ConfigError(
            "megatron was imported before megatron_resilient.enable(): on the CPU its fusions "
            "must not be compiled at import; move enable() above the first megatron import"
        )
    return ("cpu", "fixes", "core")
