"""Imports once what the forked workers of emulated nodes share."""

import gc
import importlib

# What examples/pretrain_moe.py and our own hooks import, from where the imports are slow.
_MODULES = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.datasets.fim_dataset",
    "megatron.training.datasets.sft_dataset",
    "megatron.training.utils",
    "megatron_resilient.mcore.main",
    "megatron_resilient.mcore.train_hooks",
)


def preload() -> None:
    """Enables the plugin on the CPU and imports what a pretrain script imports.

    Starts no thread: the process forks afterwards. OMP_NUM_THREADS must be 1 before torch is
    imported, and no GPU may be visible.
    """
    from megatron_resilient import plugin

    plugin.enable("cpu")
    for name in _MODULES:
        importlib.import_module(name)
    # Pages stay shared as long as no collection in a child writes to them.
    gc.collect()
    gc.freeze()
