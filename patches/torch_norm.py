"""megatron.core.transformer.torch_norm: torch's norms under sequence parallelism."""

import functools

from megatron_resilient.patching.registry import Patch

MEGATRON = ">=0.19,<0.20"


def _new(original):
    @functools.wraps(original)
    def __new__(cls, config, hidden_size, *args, **kwargs):
        if not config.sequence_parallel:
            return original(cls, config, hidden_size, *args, **kwargs)
        import copy

        unsharded = copy.copy(config)
        unsharded.sequence_parallel = False
        norm = original(cls, unsharded, hidden_size, *args, **kwargs)
        for parameter in norm.parameters():
            # Each tensor-parallel rank sees its part of the sequence: with this mark
            # finalize_model_grads sums the gradient over the tensor-parallel group.
            parameter.sequence_parallel = True
        return norm

    return __new__


PATCHES = (
    Patch(
        id="cpu.torch-norm-sequence-parallel",
        group="cpu",
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        kind="wrap",
        make=_new,
        reason="It refuses sequence parallelism, which MoE with TP > 1 demands; Apex and "
        "Transformer Engine, whose norms support it, need a GPU.",
        no_seam="The local layer spec names the class; a spec of our own would replace the user's.",
        upstream="megatron-core",
        versions=MEGATRON,
        removable_when="WrappedTorchNorm marks its parameters `sequence_parallel` itself.",
    ),
)
