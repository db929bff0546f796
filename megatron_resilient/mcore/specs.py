"""Layer specs: puts our MoE layers where a spec has Megatron's."""

import dataclasses
from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args
from torch import nn

from megatron_resilient.config import config_from_args
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import layer_hooks
from megatron_resilient.mcore.wire import wire_hooks


def resilient(mlp: Any) -> Any:
    """Returns the MLP builder of a layer spec with the gate, hooks, replicas, overlap asked for.

    Args:
        mlp: `spec.submodules.mlp`: a partial of MoELayer; anything else is returned as it is, and
            so is this where nothing is asked for.

    Raises:
        ConfigError: there are hooks, and graphs that would not call them.
    """
    from megatron_resilient.mcore.gates.build import router_builder
    from megatron_resilient.mcore.overlap_arguments import asked_for
    from megatron_resilient.mcore.replicas import moe_layer, parted_layer

    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return mlp
    args = get_args()
    config = config_from_args(args)
    options = dict(mlp.keywords)
    router = router_builder(config.gates, args.seq_length, args.num_experts, args.moe_router_topk)
    if router is not None:
        options["submodules"] = dataclasses.replace(options["submodules"], router=router)
    # Nearest to the wire: users' hooks see tokens as numbers.
    hooks = layer_hooks.registered() + wire_hooks(config.gates.wire_dtype)
    if hooks and args.cuda_graph_impl not in (None, "none"):
        raise ConfigError(
            f"--cuda-graph-impl {args.cuda_graph_impl}: hooks of MoE layers would be captured "
            "once instead of called; drop the flag or the hooks"
        )
    if config.replicas.slots_per_rank:
        return partial(moe_layer, *mlp.args, **options, hooks=hooks)
    if router is not None or hooks or asked_for(config.overlap):
        return partial(parted_layer, *mlp.args, **options, hooks=hooks)
    return mlp


def check_built(model: list[nn.Module]) -> None:
    """Checks that all MoE layers of a new model have the gate, hooks and overlap asked for.

    Raises:
        ConfigError: a layer of a class, or with a router, that this module did not choose.
    """
    from megatron_resilient.mcore.overlap_arguments import asked_for
    from megatron_resilient.mcore.parted_layer import PartedMoELayer

    every = config_from_args(get_args())
    config, overlap = every.gates, asked_for(every.overlap)
    asked = [] if overlap is None else [overlap]
    if config.gate != "megatron":
        asked.append(f"--resilient-gate {config.gate}")
    if config.wire_dtype != "model":
        asked.append(f"--resilient-wire-dtype {config.wire_dtype}")
    if layer_hooks.registered():
        asked.append("register_moe_hooks")
    if not asked:
        return
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer) and not isinstance(layer, PartedMoELayer):
                raise ConfigError(
                    f"{asked[0]}: layer {layer.layer_number} is a {type(layer).__name__} that was "
                    "made without it; have the layer spec go through "
                    "megatron_resilient.mcore.specs.resilient"
                )
