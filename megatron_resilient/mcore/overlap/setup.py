"""Makes the overlap of a model's layers from the flags, and connects it to the nodes."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import print_rank_0
from torch import distributed as dist
from torch import nn

from megatron_resilient.comm.hierarchical import Router
from megatron_resilient.comm.node_groups import NodeGroups, read_node_map
from megatron_resilient.config import OverlapConfig
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.overlap.plan import LayerOverlap, PassPlan
from megatron_resilient.mcore.overlap_arguments import asked_for


def make_overlap(config: OverlapConfig) -> LayerOverlap | None:
    """Returns the overlap of one new layer; None where Megatron's own way is to be used."""
    if asked_for(config) is None:
        return None
    if config.overlap != "fixed":
        return LayerOverlap()
    forward, backward = (
        PassPlan(degree, order=config.overlap_order) for degree in config.overlap_degrees
    )
    return LayerOverlap(forward, backward)


def overlapped_layers(model: list[nn.Module]) -> list[MoELayer]:
    """Returns this rank's layers with overlap, by layer number."""
    layers = [
        module
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, MoELayer) and getattr(module, "overlap", None) is not None
    ]
    return sorted(layers, key=lambda layer: layer.layer_number or 0)


def connect(model: list[nn.Module], config: OverlapConfig) -> None:
    """Tells the layers of a new model on which nodes their ranks are, and how rows travel.

    Collective over all ranks of the world, also those without such layers: it creates groups.

    Raises:
        ConfigError: rows are to travel by nodes, and it is unknown what they are.
    """
    if asked_for(config) is None:
        return
    group = parallel_state.get_expert_model_parallel_group()
    try:
        world_nodes = read_node_map(dist.get_world_size())
    except ConfigError:
        if config.dispatch != "direct":
            raise
        return  # nodes are for the report only
    nodes = [world_nodes[rank] for rank in dist.get_process_group_ranks(group)]
    router = _router(config.dispatch, group, world_nodes)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    for layer in overlapped_layers(model):
        layer.overlap.router = router
        layer.overlap.nodes = tuple(numbers[node] for node in nodes)


def _router(dispatch: str, group: dist.ProcessGroup, world_nodes: list[str]) -> Router:
    if dispatch == "direct":
        return Router(dispatch, NodeGroups.one_node(group))
    groups = NodeGroups.make_each(group, world_nodes)
    everywhere = [groups.even]
    if dispatch == "2d":
        from megatron_resilient.comm.gather_json import gather_json

        everywhere = gather_json(groups.even)
    if not all(everywhere):
        # A node that is lost may leave nodes of unlike size: a job does not end for that.
        print_rank_0("--resilient-dispatch 2d: nodes have unlike numbers of ranks, 1d is used")
        dispatch = "1d"
    return Router(dispatch, groups)
