"""What tests of replicas call on the ranks of a pool."""

import copy
import gc

import numpy as np
import torch
import torch.distributed as dist


def logical_weights(model, optimizer):
    """Returns [layer, kind, expert, sum of magnitudes, projection] of the experts of this rank."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_resilient.mcore.experts import slot_parameters

    rows = []
    for chunk in model:
        for layer in (m for m in chunk.modules() if isinstance(m, MoELayer)):
            held = layer.local_expert_indices
            if hasattr(layer, "holding"):
                held = layer.holding[dist.get_rank(layer.ep_group)]
            shard = dist.get_rank(layer.token_dispatcher.tp_group)
            for kind, parameters in slot_parameters(layer.experts, len(held)).items():
                for expert, parameter in zip(held, parameters, strict=True):
                    flat = parameter.detach().double().reshape(-1)
                    direction = torch.linspace(-1, 1, flat.numel(), dtype=torch.float64)
                    row = [layer.layer_number, f"{kind}, shard {shard}", int(expert)]
                    rows.append([*row, float(flat.abs().sum()), float(flat @ direction)])
    return rows


def sum_replicas(early=True, broken_rank=None):
    """Says how the next runs sum the gradients of replicas, until `restore_sums`.

    Args:
        early: layer by layer in the backward pass; else after it.
        broken_rank: which rank raises where the others begin their first exchange.
    """
    from megatron_resilient.mcore import replica_gradients

    restore_sums()
    replica_gradients.BUCKET_BYTES = 1
    if not early:
        replica_gradients.why_late = lambda *_: "asked for"
    start = replica_gradients._Bucket.start

    def fail(self):
        if dist.get_rank() == broken_rank:
            raise RuntimeError("no exchange from here")
        return start(self)

    if broken_rank is not None:
        replica_gradients._Bucket.start = fail


def restore_sums():
    """Brings back what the program does."""
    for owner, name, value in _ORIGINALS or _originals():
        setattr(owner, name, value)


_ORIGINALS = []


def _originals():
    from megatron_resilient.mcore import replica_gradients

    for owner, name in (
        (replica_gradients, "BUCKET_BYTES"),
        (replica_gradients, "why_late"),
        (replica_gradients._Bucket, "start"),
    ):
        _ORIGINALS.append((owner, name, getattr(owner, name)))
    return _ORIGINALS


def sums_alive():
    """Returns how many sums of a run that is over are still in memory."""
    from megatron_resilient.comm.replica_sum import RunningSum
    from megatron_resilient.mcore.replica_gradients import ReplicaGradients

    gc.collect()
    return sum(isinstance(one, ReplicaGradients | RunningSum) for one in gc.get_objects())


def early_sums(model, optimizer):
    """Returns [buckets begun in the last backward pass, slots without a gradient, weights]."""
    from megatron.core.utils import get_model_config

    from megatron_resilient.mcore.replicas import replicated_layers

    early = get_model_config(model[0]).finalize_model_grads_func.started_early
    idle = [
        not parameter.main_grad.any()
        for layer in replicated_layers(model)
        for parameter in layer.parameters_by_kind()["linear_fc1.weight"]
    ]
    return [early, sum(map(bool, idle)), logical_weights(model, optimizer)]


def order_in_backward(tokens, topk, recompute):
    """Returns the order in which a layer's gradients become complete: experts' weights, input."""
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = _layer_config(ranks, 8, topk, "alltoall")
    holding = [[(2 * r + i) % 8 for i in range(4)] for r in range(ranks)]
    layer = _layer(ReplicatedMoELayer, config, 1, slots_per_rank=4, first_holding=holding)
    layer.train()
    order = []
    for parameter in layer.experts.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: order.append("weight"))

    def watch(_, inputs):
        if torch.is_grad_enabled():
            inputs[0].register_hook(lambda _: order.append("input"))

    layer.register_forward_pre_hook(watch)

    def forward(hidden):
        return layer(2 * hidden)[0]

    hidden = torch.randn(
        (tokens, 1, config.hidden_size), generator=torch.Generator().manual_seed(rank)
    ).requires_grad_()
    output = checkpoint(forward, False, hidden) if recompute else forward(hidden)
    output.sum().backward()
    return order


def corrupt_a_replica(model, optimizer):
    """Changes one bit of one replica on the last rank; returns what the check then says."""
    from megatron_resilient.errors import ReplicaMismatchError
    from megatron_resilient.mcore.replica_check import check_replicas
    from megatron_resilient.mcore.replicas import replicated_layers

    layers = replicated_layers(model)
    check_replicas(layers)
    rank, layer = dist.get_rank(), layers[1]
    own = layer.holding[rank]
    everywhere = [slot for slots in layer.holding for slot in slots]
    slot, expert = next((i, e) for i, e in enumerate(own) if everywhere.count(e) > 1)
    if rank == dist.get_world_size() - 1:
        weight = layer.parameters_by_kind()["linear_fc1.weight"][slot]
        words = weight.data.view(-1).view(torch.int32)
        words[5] ^= 1
    chosen = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, [layer.layer_number, expert])
    try:
        check_replicas(layers)
    except ReplicaMismatchError as error:
        return [chosen[-1], str(error)]
    return [chosen[-1], "no error"]


def sum_over_replicas(seed):
    """Sums random tensors over random holdings; returns the largest error, and if bits agree."""
    from megatron_resilient.comm.replica_sum import ReplicaSum

    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng(seed)
    holdings, sizes, data = [], [], []
    for _ in range(3):
        slots, experts = int(random.integers(1, 4)), int(random.integers(1, 7))
        holdings.append(random.integers(0, experts, (ranks, slots)).tolist())
        sizes.append(int(random.integers(1, 40)))
        values = random.standard_normal((ranks, slots, sizes[-1]))
        data.append(torch.tensor(values, dtype=torch.float64))
    mine = [tensor.clone() for unit in data for tensor in unit[rank]]
    ReplicaSum(holdings, sizes, dist.group.WORLD)(mine)
    error, results = 0.0, iter(mine)
    bits = {}
    for unit, (holding, values) in enumerate(zip(holdings, data, strict=True)):
        for expert in holding[rank]:
            result = next(results)
            holders = np.array(holding) == expert
            expected = values[torch.from_numpy(holders)].sum(dim=0)
            error = max(error, float((result - expected).abs().max()))
            bits[f"{unit}/{expert}"] = [value.hex() for value in result.tolist()]
    everyone = [None] * ranks
    dist.all_gather_object(everyone, bits)
    same = all(
        other[key] == value for other in everyone for key, value in bits.items() if key in other
    )
    return [error, same]


def move_experts(seed):
    """Moves random experts from one random holding to another; returns whether all arrived."""
    from megatron_resilient.comm.transfer import plan_fetches, transfer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng(seed)
    held = random.integers(0, int(random.integers(1, 6)), (ranks, int(random.integers(1, 4))))
    wanted = random.choice(held.reshape(-1), (ranks, int(random.integers(1, 5))))
    shapes = {torch.float32: (3, 2), torch.float64: (5,), torch.bfloat16: ()}

    def content(expert, dtype):
        return torch.full(shapes[dtype], float(expert) + 1, dtype=dtype)

    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    sources = [[content(expert, dtype) for expert in held[rank]] for dtype in kinds]
    targets = [[torch.zeros(shapes[dtype], dtype=dtype) for _ in wanted[rank]] for dtype in kinds]
    transfer(plan_fetches(held.tolist(), wanted.tolist()), sources, targets, dist.group.WORLD)
    arrived = all(
        torch.equal(target, content(expert, dtype))
        for dtype, slots in zip(kinds, targets, strict=True)
        for target, expert in zip(slots, wanted[rank], strict=True)
    )
    return arrived


def compare_layers(seed, tokens, topk=2, first_slot_only=False, dispatcher="alltoall"):
    """Runs a stock and a replicated layer on the same tokens, forward and backward.

    Returns {what: largest difference relative to the largest value}.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_resilient.comm.replica_sum import ReplicaSum
    from megatron_resilient.mcore import moe_layer
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng(seed)
    experts, slots = 8, int(random.integers(2, 6))
    holding = _random_holding(random, ranks, slots, experts)
    config = _layer_config(ranks, experts, topk, dispatcher)
    stock = _layer(MoELayer, config, seed)
    replicated = _layer(
        ReplicatedMoELayer, config, seed, slots_per_rank=slots, first_holding=holding
    )
    original = moe_layer.split_all_tokens
    if first_slot_only:
        moe_layer.split_all_tokens = _everything_to_first_slots
    try:
        shape = (tokens, 1, config.hidden_size)
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        # An offset that all tokens share makes some experts hot and leaves others empty.
        hidden = torch.randn(shape, generator=generator) + 2 * torch.randn(
            config.hidden_size, generator=torch.Generator().manual_seed(seed)
        )
        upstream = torch.randn(shape, generator=generator)
        results = []
        for layer in (stock, replicated):
            own = hidden.clone().requires_grad_()
            output, _ = layer(own)
            output.backward(upstream)
            results.append((output.detach(), own.grad, layer.router.weight.grad))
    finally:
        moe_layer.split_all_tokens = original
    differences = {
        name: _difference(a, b)
        for name, a, b in zip(
            ("output", "input gradient", "router gradient"), *results, strict=True
        )
    }
    kinds = replicated.parameters_by_kind()
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad for ps in kinds.values() for p in ps
    ]
    ReplicaSum(
        [holding] * len(kinds), [ps[0].numel() for ps in kinds.values()], replicated.ep_group
    )(gradients)
    differences["expert gradient"] = _expert_difference(stock, kinds, gradients, holding[rank])
    return differences


def refuse_nan():
    """Gives one rank a router of NaN; returns what every rank says."""
    from megatron_resilient.errors import NonFiniteRouterError
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = _layer_config(ranks, 8, 2, "alltoall")
    holding = [[(rank_ * 2 + i) % 8 for i in range(4)] for rank_ in range(ranks)]
    layer = _layer(ReplicatedMoELayer, config, 1, slots_per_rank=4, first_holding=holding)
    layer.set_layer_number(3)
    if rank == 1:
        layer.router.weight.data.fill_(float("nan"))
    try:
        layer(torch.randn(4, 1, config.hidden_size))
        said = "no error"
    except NonFiniteRouterError as error:
        said = str(error)
    return said


def what_the_dispatcher_sees():
    """Puts a stand-in where Megatron's dispatcher is; returns the shapes that it is given."""
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

    ranks = dist.get_world_size()
    config = _layer_config(ranks, 8, 2, "alltoall")
    holding = [[(rank_ * 2 + i) % 8 for i in range(4)] for rank_ in range(ranks)]
    layer = _layer(ReplicatedMoELayer, config, 1, slots_per_rank=4, first_holding=holding)

    class StandIn:
        tp_ep_group = layer.token_dispatcher.tp_ep_group

        def dispatch_preprocess(self, hidden, routing_map, probs):
            self.seen = [list(routing_map.shape), list(probs.shape), str(routing_map.dtype)]
            self.topk = routing_map.sum(dim=1).tolist()
            return hidden, probs

    layer.token_dispatcher = StandIn()
    hidden = torch.randn(6, 1, config.hidden_size)
    layer.preprocess(hidden, *layer.route(hidden))
    seen = [*layer.token_dispatcher.seen, layer.token_dispatcher.topk]
    return seen


def each(probe, cases):
    """Calls a function of this module for each of `cases`, in one set of process groups."""
    _start()
    results = [globals()[probe](**case) for case in cases]
    _stop()
    return results


def _start():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)


def _stop():
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _layer_config(ranks, experts, topk, dispatcher):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=experts,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=1,
        moe_router_topk=topk,
        moe_router_pre_softmax=topk == 1,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        moe_ffn_hidden_size=8,
        sequence_parallel=False,
    )


def _layer(cls, config, seed, **options):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed + 1, force_reset_rng=True)
    layer = cls(config=copy.copy(config), submodules=_submodules(), **options)
    layer.set_layer_number(1)
    return layer


def _submodules():
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    return MoESubmodules(experts=LocalSpecProvider().grouped_mlp_modules(False))


def _random_holding(random, ranks, slots, experts):
    while True:
        holding = [sorted(random.choice(experts, slots, replace=False)) for _ in range(ranks)]
        if len({e for own in holding for e in own}) == experts:
            return [[int(e) for e in own] for own in holding]


def _everything_to_first_slots(tokens, slots):
    flat = slots.holding_RC.reshape(-1)
    split = np.zeros((len(tokens), flat.size), dtype=np.int64)
    for expert in range(tokens.shape[1]):
        split[:, int((flat == expert).argmax())] = tokens[:, expert]
    return split, np.zeros(len(slots.holding_RC), dtype=np.int64)


def _difference(a, b):
    scale = float(a.abs().max())
    return float((a - b).abs().max()) / scale if scale else float(b.abs().max())


def _expert_difference(stock, kinds, gradients, own):
    """Compares summed replica gradients with stock's, whichever rank has them."""
    from megatron_resilient.mcore.experts import slot_parameters

    stock_own = {
        (kind, expert): torch.zeros_like(p) if p.grad is None else p.grad
        for kind, parameters in slot_parameters(
            stock.experts, len(stock.local_expert_indices)
        ).items()
        for expert, p in zip(stock.local_expert_indices, parameters, strict=True)
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, stock_own)
    expected = {key: value for table in everyone for key, value in table.items()}
    scale = max(float(value.abs().max()) for value in expected.values())
    results = iter(gradients)
    return max(
        float((expected[kind, expert] - next(results)).abs().max()) / scale
        for kind in kinds
        for expert in own
    )
