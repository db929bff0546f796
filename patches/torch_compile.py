"""torch.compile on a machine without CUDA: the function itself.

Megatron compiles small fusions at import. On a CPU that costs seconds per process, needs a C++
compiler, and gains nothing at the sizes that people debug with.
"""

from megatron_resilient.patching.registry import Patch

from .torch_cuda import TORCH


def _compile(original):
    def compile(model=None, **kwargs):
        return (lambda function: function) if model is None else model

    return compile


PATCHES = (
    Patch(
        id="cpu.compile",
        group="cpu",
        target="torch:compile",
        kind="replace",
        make=_compile,
        reason="Megatron's jit_fuser compiles at import: about 3 s a process, and a C++ compiler.",
        no_seam="--disable-jit-fuser is read after the modules that use it are imported.",
        upstream="torch",
        versions=TORCH,
        removable_when="Megatron's jit_fuser can be switched off before import.",
    ),
)
