"""megatron.training.datasets.data_samplers: loaders that know steps; the CPU's random numbers."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _build_pretraining_data_loader(original):
    @functools.wraps(original)
    def build_pretraining_data_loader(*args, **kwargs):
        import torch
        from megatron.training import get_args

        loader = original(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().manual_seed(get_args().seed)
        return loader

    return build_pretraining_data_loader


def _step_loader(original):
    @functools.wraps(original)
    def build_pretraining_data_loader(*args, **kwargs):
        from megatron_resilient.mcore import uneven

        return uneven.data_loader(original, *args, **kwargs)

    return build_pretraining_data_loader


PATCHES = (
    Patch(
        id="cpu.data-loader-generator",
        group="cpu",
        target="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
        kind="wrap",
        make=_build_pretraining_data_loader,
        reason="A data loader draws a seed for its workers from the CPU's generator, which here is "
        "the one that dropout uses: a resumed run, whose loader starts after the checkpoint is "
        "loaded, drops other activations than the run that was not interrupted.",
        no_seam="The function builds the loader without a generator.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=("megatron.training.training:build_pretraining_data_loader",),
        removable_when="The loader is given a generator.",
    ),
    Patch(
        id="core.data-loader",
        group="core",
        target="megatron.training.datasets.data_samplers:build_pretraining_data_loader",
        kind="wrap",
        make=_step_loader,
        reason="Megatron's sampler cuts the data into waves of one microbatch a rank and knows no "
        "steps: where the data-parallel ranks do not divide the global batch, the last wave would "
        "take samples of the next step. Where they do, Megatron's loader is returned.",
        no_seam="The sampler is built inside the function; `--dataloader-type external` leaves the "
        "loader to every script.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=("megatron.training.training:build_pretraining_data_loader",),
        after=("cpu.data-loader-generator",),
        removable_when="A batch sampler can be passed in.",
    ),
)
