"""What tests of overlap call on the ranks of a pool: layers in chunks beside Megatron's own."""

import torch
import torch.distributed as dist

from tests.support import gate_probe
from tests.support.gate_probe import EXPERTS, HIDDEN

WORLDS = {
    "EP4": {"ep": 4},
    "EP2": {"ep": 2},
    "EP2 ETP2": {"ep": 2, "tp": 2, "etp": 2},
    "EP1": {"ep": 1},
}
# Tokens of the microbatches: few of them leave chunks and slots empty.
TOKENS = (32, 3, 1)


def set_node_map(nodes):
    """Has this process told the node of each rank, as a launcher does; None: not told."""
    import os

    from megatron_resilient.comm.node_groups import NODE_MAP

    if nodes is None:
        os.environ.pop(NODE_MAP, None)
    else:
        os.environ[NODE_MAP] = nodes


def compare(layout, cases):
    """Returns, case by case, how far a layer in chunks is from Megatron's own.

    Each is {what: largest difference, relative to the largest value}, over all ranks.
    """
    with gate_probe._processes(), gate_probe._world(**WORLDS[layout]):
        return {name: _compare(WORLDS[layout], **case) for name, case in cases.items()}


def _compare(
    world, forward=(1,), backward=(1,), algorithm="direct", nodes=None, dtype="float32", **layer
):
    stock = _layer(world, stock=True, dtype=dtype)
    ours = _layer(world, overlap=_overlap(forward, backward), dtype=dtype, **layer)
    if algorithm != "direct":
        _route(ours, algorithm, nodes)
    theirs, found = _run(stock), _run(ours)
    differences = {
        what: max(map(gate_probe._difference, found[what], theirs[what]))
        for what in ("output", "input", "router")
    }
    differences["experts"] = _experts_differ(stock, ours)
    worst = torch.tensor(list(differences.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(differences, worst.tolist(), strict=True))


def _overlap(forward, backward):
    from megatron_resilient.mcore.overlap.plan import LayerOverlap, PassPlan

    def plan(degree, fractions=None, order="gather-first"):
        order = order if isinstance(order, str) else tuple(map(tuple, order))
        return PassPlan(degree, None if fractions is None else tuple(fractions), order)

    return LayerOverlap(plan(*forward), plan(*backward))


def _layer(world, stock=False, overlap=None, hooks=False, dtype="float32", slots=0):
    """Builds a layer; its weights depend on logical expert, name and tensor-parallel rank alone."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    from megatron_resilient.mcore.experts import slot_parameters
    from megatron_resilient.mcore.layer_hooks import LayerHooks
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
    from megatron_resilient.mcore.parted_layer import PartedMoELayer

    ep, tp, etp = world["ep"], world.get("tp", 1), world.get("etp", 1)
    kind = getattr(torch, dtype)
    changes = {} if dtype == "float32" else {"params_dtype": kind, "bf16": True}
    config = gate_probe._config(ep, tp, "alltoall", etp, **changes)
    experts = LocalSpecProvider().grouped_mlp_modules(False)
    common = {"config": config, "submodules": MoESubmodules(experts=experts)}
    pair = (LayerHooks(None, gate_probe.twice, gate_probe.half, gate_probe.half, gate_probe.twice),)
    pair = pair if hooks else ()
    if slots:
        holding = [[(EXPERTS // ep * r + i) % EXPERTS for i in range(slots)] for r in range(ep)]
        layer = ReplicatedMoELayer(
            **common, slots_per_rank=slots, first_holding=holding, hooks=pair, overlap=overlap
        )
        held = holding[dist.get_rank(layer.ep_group)]
    else:
        options = {} if stock else {"hooks": pair, "overlap": overlap}
        layer = (MoELayer if stock else PartedMoELayer)(**common, **options)
        held = layer.local_expert_indices
    layer.set_layer_number(1)
    shard = dist.get_rank(layer.token_dispatcher.tp_group)
    with torch.no_grad():
        for name, parameters in slot_parameters(layer.experts, len(held)).items():
            for expert, parameter in zip(held, parameters, strict=True):
                drawn = gate_probe._drawn(parameter.shape, f"{name} {expert} {shard}")
                parameter.copy_(drawn)
        layer.router.weight.copy_(gate_probe._drawn(layer.router.weight.shape, "router"))
    return layer.to(kind)


def _route(layer, algorithm, nodes):
    from megatron_resilient.comm.hierarchical import Router
    from megatron_resilient.comm.node_groups import NodeGroups

    layer.overlap.router = Router(algorithm, NodeGroups.make_each(layer.ep_group, nodes))


def _run(layer):
    """Runs all microbatches, the gradients of the weights added up."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 7)
    found = {"output": [], "input": [], "router": []}
    dtype = layer.router.weight.dtype
    for tokens in TOKENS:
        hidden = torch.randn((tokens, 1, HIDDEN), generator=generator).to(dtype).requires_grad_()
        target = torch.randn((tokens, 1, HIDDEN), generator=generator).to(dtype)
        output = layer(hidden)[0]
        output.backward(target)
        found["output"].append(output.detach())
        found["input"].append(hidden.grad)
    found["router"].append(layer.router.weight.grad)
    return found


def _experts_differ(stock, ours):
    """Compares experts' gradients, those of replicas summed, whichever rank has them."""
    from megatron_resilient.comm.replica_sum import ReplicaSum
    from megatron_resilient.mcore.experts import slot_parameters

    if hasattr(ours, "holding"):
        kinds = list(ours.parameters_by_kind().values())
        ReplicaSum([ours.holding] * len(kinds), [ps[0].numel() for ps in kinds], ours.ep_group)(
            [p.grad for ps in kinds for p in ps]
        )
    group = ours.ep_group
    theirs, found = ({}, {})
    for layer, table in ((stock, theirs), (ours, found)):
        held = layer.local_expert_indices
        if hasattr(layer, "holding"):
            held = layer.holding[dist.get_rank(group)]
        for kind, parameters in slot_parameters(layer.experts, len(held)).items():
            for expert, parameter in zip(held, parameters, strict=True):
                table[kind, expert] = parameter.grad
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, theirs, group=group)
    expected = {key: value for table in everyone for key, value in table.items()}
    return max(gate_probe._difference(value, expected[key]) for key, value in found.items())


def report_passes():
    """Returns what `on_outcome` is told by two layers that differ in their degrees, and the window.

    By pass: [names of operations in their lanes' order, units by operation], for this rank.
    """
    with gate_probe._processes(), gate_probe._world(**WORLDS["EP2 ETP2"]):
        layer = _layer(WORLDS["EP2 ETP2"], overlap=_overlap((2,), (3, None, "scatter-first")))
        told, sent = {}, []

        def tell(name, report):
            spans = [[span.lane, *span.key, span.start_seconds] for span in report.spans()]
            units = [[*key, amount] for key, amount in report.units.items()]
            told.setdefault(name, [spans, units])

        layer.overlap.on_outcome = tell
        layer.overlap.gradient_window = lambda: sent.append(1) or 12.0
        _run(layer)
        told["windows"] = len(sent)
        layer.overlap.on_outcome = layer.overlap.gradient_window = None
        plain = _run(layer)["output"]
        layer.eval()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(dist.get_rank() + 7)
            hidden = torch.randn((TOKENS[0], 1, HIDDEN), generator=generator)
            told["eval"] = gate_probe._difference(layer(hidden)[0], plain[0])
        return told


class ExpertError(Exception):
    """What an expert raises in `break_an_expert`."""


def break_an_expert(broken_rank, during):
    """Returns [type, message, notes] of what each rank's layer raises when one rank's expert fails.

    It fails in the second chunk. A rank that fails cuts its sockets, as its end or a fence would.

    Args:
        broken_rank: whose expert fails.
        during: "forward" or "backward".
    """
    from megatron_resilient.elastic.sockets import cut_sockets, tcp_inodes

    older, calls = tcp_inodes(), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2 and int(dist.get_rank()) == broken_rank:
            raise ExpertError("no more")

    try:
        with gate_probe._processes(), gate_probe._world(4):
            layer = _layer(WORLDS["EP4"], overlap=_overlap((2,), (2,)))
            if during == "forward":
                layer.experts.register_forward_pre_hook(fail)
            else:
                layer.experts.register_full_backward_pre_hook(fail)
            try:
                hidden = torch.randn(32, 1, HIDDEN).requires_grad_()
                layer(hidden)[0].sum().backward()
            except BaseException:
                cut_sockets(older)
                raise
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "__notes__", [])]
    return None
