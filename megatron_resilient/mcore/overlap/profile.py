"""The costs of this job's own operations, measured on its own groups (FSMoE, section 4.1).

arXiv 2501.10714. What a layer is going to call is timed, not something like it: the dispatch by its
router, the experts' module with its slots, the reduction of dense gradients on their group. Units
are those that `units.py` gives to what a pass did.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import get_args

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.linear_fit import fit_linear
from megatron_resilient.comm.device import device_of
from megatron_resilient.comm.hierarchical import Router
from megatron_resilient.comm.measure import Effort, Probe
from megatron_resilient.comm.node_groups import NodeGroups, cut, read_node_map
from megatron_resilient.comm.profiler import ExpertShape, Measured, load_or_measure
from megatron_resilient.comm.range_sum import sum_at_owners, sum_everywhere
from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore.overlap.units import row_flops_of, sent_rows

# A chunk is smaller than a layer's tokens, and routing is uneven: some ranks get more.
_SMALLEST, _LARGEST = 1 / 16, 1.5
_EFFORT = Effort(repetitions=5, budget_seconds=10.0)


def measure_profile(layer: MoELayer, tokens: int, folder: Path | None) -> Measured:
    """Returns the profile of an MoE layer, measured now or by an earlier job.

    Collective over the ranks of this pipeline stage, as `stage_group` has them. Takes seconds.

    Args:
        layer: with an overlap that is connected; others of the model are like it.
        tokens: that a rank routes in a microbatch.
        folder: where profiles are kept; None: nowhere.
    """
    dispatcher, config = layer.token_dispatcher, layer.config
    group = stage_group()
    dtype = config.params_dtype
    parts = dispatcher.tp_size
    shape = ExpertShape(
        config.moe_latent_size or config.hidden_size,
        (config.moe_ffn_hidden_size or config.ffn_hidden_size) // parts,
        config.gated_linear_unit,
        dtype,
    )
    groups = NodeGroups(group, _nodes(group), dispatcher.tp_group, dispatcher.ep_group)
    row_bytes = shape.hidden * dtype.itemsize
    layer_bytes = tokens * config.moe_router_topk * row_bytes
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    router = layer.overlap.router or Router("direct", NodeGroups.one_node(dispatcher.ep_group))
    largest = max(row_bytes, int(_LARGEST * layer_bytes))
    smallest = max(row_bytes, int(_SMALLEST * layer_bytes))
    sizes = _sizes(smallest // row_bytes, largest // row_bytes)
    args = get_args()
    dispatch = _dispatch_probe(router, layer.overlap.nodes, shape, sizes)
    gradients = _gradients_probe(dense, shape, sizes)
    probes = {
        "gemm": _experts_probe(layer, shape, sizes),
        "a2a": dispatch if dispatcher.ep_size > 1 else None,
        "allreduce": gradients if dense.size() > 1 else None,
    }
    ways = (
        f"ep {dispatcher.ep_size}, expert tp {parts}, dp {dense.size()}, {router.algorithm}, "
        f"{layer.num_local_experts} slots, {smallest} to {largest} bytes, "
        f"sharded {args.use_distributed_optimizer}, "
        f"fp32 gradients {args.accumulate_allreduce_grads_in_fp32}"
    )
    return load_or_measure(
        groups,
        shape,
        fit_linear,
        folder=folder,
        effort=_EFFORT,
        smallest_bytes=smallest,
        largest_bytes=largest,
        instead=probes,
        ways=ways,
    )


def profile_of(measured: Measured) -> Profile:
    """Returns the planner's form; what this job does not have costs nothing."""
    lines = {name: LinearCost(line.alpha_ms, line.beta) for name, line in measured.lines.items()}
    return Profile.of(lines, measured.quality)


def stage_group() -> dist.ProcessGroup:
    """Returns the ranks of this pipeline stage, which have the same layers."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _nodes(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    ranks = dist.get_process_group_ranks(group)
    try:
        nodes = read_node_map(dist.get_world_size())
    except ConfigError:  # for the name of the profile only
        return tuple((rank,) for rank in range(len(ranks)))
    return cut([nodes[rank] for rank in ranks])


def _sizes(smallest: int, largest: int) -> list[int]:
    found = [max(1, smallest)]
    while found[-1] < largest:
        found.append(min(largest, max(found[-1] + 1, round(found[-1] * 1.6))))
    return found


def _rows(shape: ExpertShape, count: int, device: torch.device) -> torch.Tensor:
    # Not of zeros, whose products take a GPU less power; training's random numbers stay.
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.empty(count, shape.hidden, dtype=shape.dtype, device=device)
    return rows.normal_(generator=generator)


def _dispatch_probe(
    router: Router, nodes: Sequence[int] | None, shape: ExpertShape, sizes: Sequence[int]
) -> Probe:
    """A dispatch as the layer's, of as many rows to each rank."""
    group = router.groups.whole
    ranks, rank = group.size(), group.rank()

    def counts(count: int) -> np.ndarray:
        return np.full((ranks, ranks), max(1, count // ranks))

    def units(count: int) -> float:
        rows = counts(count)
        sent, _ = sent_rows(router.plan(rows), rows, rank, nodes)
        return sent * shape.hidden * shape.dtype.itemsize

    def make(count: int) -> Callable[[], object]:
        planned = router.plan(counts(count))
        rows = _rows(shape, ranks * max(1, count // ranks), device_of(group))
        return lambda: planned.forward(rows)

    # Fewer rows than ranks would all be the same size.
    return Probe([size for size in sizes if size >= ranks] or [ranks], units, make)


def _experts_probe(layer: MoELayer, shape: ExpertShape, sizes: Sequence[int]) -> Probe:
    """The experts of this rank, all slots with as many rows."""
    slots = layer.num_local_experts
    device = next(layer.experts.parameters()).device
    flops = row_flops_of(layer.config) / layer.token_dispatcher.tp_size

    def per_slot(count: int) -> int:
        return max(1, count // slots)

    def make(count: int) -> Callable[[], object]:
        rows = _rows(shape, slots * per_slot(count), device)
        slot_rows = torch.full((slots,), per_slot(count), dtype=torch.long)
        probs = torch.ones(len(rows), device=device)

        def compute() -> object:
            with torch.no_grad():
                return layer.experts(rows, slot_rows, probs)

        return compute

    distinct = {per_slot(size): size for size in reversed(sizes)}
    return Probe(sorted(distinct.values()), lambda count: slots * per_slot(count) * flops, make)


def _gradients_probe(group: dist.ProcessGroup, shape: ExpertShape, sizes: Sequence[int]) -> Probe:
    """The sum of dense gradients over data-parallel ranks, as `SlicedBucket` makes it."""
    args, ranks = get_args(), group.size()
    dtype = torch.float32 if args.accumulate_allreduce_grads_in_fp32 else shape.dtype
    add = sum_at_owners if args.use_distributed_optimizer else sum_everywhere

    def make(count: int) -> Callable[[], object]:
        elements = count * shape.hidden // ranks * ranks
        buffer = torch.ones(elements, dtype=dtype, device=device_of(group))
        return lambda: add(buffer, 0, elements, group, True)

    def units(count: int) -> float:
        return float(count * shape.hidden // ranks * ranks * dtype.itemsize)

    return Probe(sizes, units, make)
