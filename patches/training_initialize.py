"""megatron.training.initialize: training may start without CUDA."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _initialize_megatron(original):
    @functools.wraps(original)
    def initialize_megatron(*args, **kwargs):
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


PATCHES = (
    Patch(
        id="cpu.initialize-megatron",
        group="cpu",
        target="megatron.training.initialize:initialize_megatron",
        kind="wrap",
        make=_initialize_megatron,
        reason="It asserts torch.cuda.is_available(), which stays honest.",
        no_seam="`allow_no_cuda` exists, but pretrain() does not pass it on.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=(
            "megatron.training:initialize_megatron",
            "megatron.training.training:initialize_megatron",
        ),
        removable_when="pretrain() passes allow_no_cuda on.",
    ),
)
