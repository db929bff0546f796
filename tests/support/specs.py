"""A layer spec as a user would write it, with a class of his own, for `--spec MODULE FUNCTION`."""

from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer


class OwnMoELayer(MoELayer):
    """A user's layer: Megatron's under another name."""


def own_layer_spec(config):
    """Returns Megatron's spec of a local layer, with OwnMoELayer in it."""
    model = config.transformer
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_moe_experts, normalization=model.normalization
    )
    spec.submodules.mlp = partial(OwnMoELayer, **spec.submodules.mlp.keywords)
    return spec


def moe_layer_classes(model, optimizer):
    """Returns the names of the classes of the MoE layers of a model."""
    modules = [module for chunk in model for module in chunk.modules()]
    return sorted({type(m).__name__ for m in modules if isinstance(m, MoELayer)})
