"""megatron.core.models.gpt.moe_module_specs: MoE layers with replicas, other gates, hooks."""

import functools

from megatron_resilient.patching.registry import Patch

from .torch_norm import MEGATRON


def _get_moe_module_spec_for_backend(original):
    @functools.wraps(original)
    def get_moe_module_spec_for_backend(*args, **kwargs):
        from megatron_resilient.mcore.specs import resilient

        return resilient(original(*args, **kwargs))

    return get_moe_module_spec_for_backend


PATCHES = (
    Patch(
        id="core.moe-layer",
        group="core",
        target="megatron.core.models.gpt.moe_module_specs:get_moe_module_spec_for_backend",
        kind="wrap",
        make=_get_moe_module_spec_for_backend,
        reason="The MoE layers of every spec that Megatron makes have the replica slots, the gate, "
        "the hooks and the wire that flags and script ask for; where none is asked for, the spec "
        "is returned as it is.",
        no_seam="A layer spec names its MoE layer, but then every script and --spec would have to "
        "change. A spec written by hand can call megatron_resilient.mcore.specs.resilient.",
        upstream="megatron-core",
        versions=MEGATRON,
        bound_in=("megatron.core.models.gpt.gpt_layer_specs:get_moe_module_spec_for_backend",),
        removable_when="The class of the MoE layer is a setting of TransformerConfig.",
    ),
)
