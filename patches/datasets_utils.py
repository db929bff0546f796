"""megatron.core.datasets.utils: the dataset helpers of the wheel are already compiled."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _compile_helpers(original):
    @functools.wraps(original)
    def compile_helpers():
        import importlib.util
        from pathlib import Path

        from megatron.core.datasets import utils

        has_makefile = Path(utils.__file__).with_name("Makefile").exists()
        if not has_makefile and importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
            return
        original()

    return compile_helpers


PATCHES = (
    Patch(
        id="fixes.compile-helpers",
        group="fixes",
        target="megatron.core.datasets.utils:compile_helpers",
        kind="wrap",
        make=_compile_helpers,
        reason="It runs `make` in the installed package. The wheel ships the compiled extension "
        "but no Makefile: make fails and training exits with status 1.",
        no_seam="initialize_megatron always calls it.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="The wheel ships the Makefile, or compile_helpers looks for the extension.",
    ),
)
