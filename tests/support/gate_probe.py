"""What tests of gates and hooks call on the ranks of a pool."""

import contextlib

import torch
import torch.distributed as dist

EXPERTS, HIDDEN, FFN, LENGTH, SEQUENCES, TOPK = 8, 16, 8, 16, 4, 2
WORLDS = {
    "EP4": {"ep": 4},
    "EP2": {"ep": 2},
    "TP2 EP2": {"ep": 2, "tp": 2},
}
VARIANTS = {
    "": {},
    " allgather": {"dispatcher": "allgather"},
    " replicas": {"slots": 6},
    " recompute": {"recompute": True},
    " hooks": {"paired": True},
    " hooks, replicas": {"paired": True, "slots": 6},
}
# What is tried in which world.
LAYOUTS = {
    "EP4": tuple(VARIANTS),
    "EP2": ("",),
    "TP2 EP2": ("", " replicas"),
}
# What does not depend on the gate, but on whether tokens are mixed.
FOR_TWO_GATES = (" recompute", " hooks", " hooks, replicas")


def layer_losses(gates, steps=2):
    """Trains one layer with each gate on the same sequences in each layout.

    Returns {gate: {layout: [losses of the steps, magnitudes of the router's gradients in the first
    step, tokens of each expert in the first step]}}. GShard's gate is without its noise.
    """
    found = {gate: {} for gate in gates}
    with _processes():
        for name, world in WORLDS.items():
            with _world(**world):
                for gate in gates:
                    for variant in LAYOUTS[name]:
                        if variant in FOR_TWO_GATES and gate not in ("xmoe", "soft"):
                            continue
                        result = _train(gate, steps, **world, **VARIANTS[variant])
                        found[gate][name + variant] = result
    return found


def _train(gate, steps, recompute=False, **layout):
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_resilient.mcore.expert_load import ExpertLoad

    layer = _layer(gate, **layout)
    if gate == "gshard":
        layer.router.eval()
    load = ExpertLoad([layer])
    tokens, targets = _data(layout.get("tp", 1))
    losses, first = [], None
    for _ in range(steps):
        total = torch.zeros(())
        for one, target in zip(tokens, targets, strict=True):  # each sequence a microbatch
            hidden = one.clone().requires_grad_()
            run = _first_of(layer)
            output = checkpoint(run, False, hidden) if recompute else run(hidden)
            loss = (output - target).square().sum() / (SEQUENCES * LENGTH)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
        _sum_gradients(layer)
        if first is None:
            first = {
                name: float(p.grad.double().abs().sum())
                for name, p in layer.router.named_parameters()
            }
            counts = load.take(dist.group.WORLD).get(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    load.remove()
    return [losses, first, counts]


def _first_of(layer):
    return lambda hidden: layer(hidden)[0]


def twice(tokens, layer):
    """Doubles: exact, and undone exactly by `half`."""
    return tokens * 2


def half(tokens, layer):
    """Halves."""
    return tokens / 2


def parts_and_wires():
    """Runs one layer's tokens in several ways; returns what differs from stock's, by case.

    Each is [largest difference of the output, of the input's gradient], relative to the largest
    value.
    """
    from megatron_resilient.mcore.layer_hooks import LayerHooks
    from megatron_resilient.mcore.wire import wire_hooks

    places = []

    def noting(place):
        def hook(tensor, layer):
            places.append(place)
            return tensor

        return hook

    both = tuple(
        LayerHooks(
            noting(f"start {n}"),
            noting(f"dispatch {n}"),
            noting(f"arrived {n}"),
            noting(f"combine {n}"),
            noting(f"back {n}"),
            noting(f"end {n}"),
        )
        for n in (1, 2)
    )
    with _processes(), _world(4):
        stock = _both_ways(_layer("megatron", 4, stock=True))
        cases = {
            "parted": _both_ways(_layer("megatron", 4)),
            "part by part": _both_ways(_layer("megatron", 4), _part_by_part),
            "noting": _both_ways(_layer("megatron", 4, hooks=both)),
            "bf16": _both_ways(_layer("megatron", 4, hooks=wire_hooks("bf16"))),
            "fp8": _both_ways(_layer("megatron", 4, hooks=wire_hooks("fp8"))),
            "fp8 replicas": _both_ways(_layer("megatron", 4, slots=4, hooks=wire_hooks("fp8"))),
        }
        refused = {
            "no tensor": lambda tensor, layer: None,
            "rows": lambda tensor, layer: tensor[1:],
        }
        said = {}
        for name, hook in refused.items():
            layer = _layer("megatron", 4, hooks=(LayerHooks(before_combine=hook),))
            try:
                layer(_data(1)[0][0])
            except TypeError as error:
                said[name] = str(error)
    differences = {
        name: [_difference(ours, theirs) for ours, theirs in zip(case, stock, strict=True)]
        for name, case in cases.items()
    }
    return [differences, places, said]


def _both_ways(layer, forward=None):
    hidden = _data(1)[0][0].clone().requires_grad_()
    output = (forward or (lambda each, x: each(x)[0]))(layer, hidden)
    output.backward(_data(1)[1][0])
    return output.detach(), hidden.grad


def _part_by_part(layer, hidden):
    """Runs a layer by the table of its parts."""
    from megatron_resilient.mcore.parted_layer import PARTS

    run = {part: getattr(layer, method) for part, method in PARTS.items()}
    weights, routing_map = run["Gate"](hidden)
    rows, weights = run["Order"](hidden, weights, routing_map)
    rows, weights = run["Dispatch"](rows, weights)
    outputs, _ = run["Expert"](rows, weights)
    return run["I-Order"](run["Combine"](outputs), None)


def _difference(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def router_weights(model, optimizer):
    """Returns [name, elements in hexadecimal sums] of the routers' parameters of this rank."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [
        [f"{router.layer_number} {name}", float(parameter.detach().double().abs().sum()).hex()]
        for chunk in model
        for router in chunk.modules()
        if isinstance(router, TopKRouter)
        for name, parameter in router.named_parameters()
    ]


_registrations = []


def register():
    """Has the models built from now on double what they send, and halve what arrives."""
    import megatron_resilient

    options = {
        "before_dispatch": twice,
        "after_dispatch": half,
        "before_combine": half,
        "after_combine": twice,
    }
    _registrations.append(megatron_resilient.register_moe_hooks(**options))


def unregister():
    """Takes it back."""
    _registrations.pop().remove()


@contextlib.contextmanager
def _processes():
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _world(ep, tp=1, etp=1):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _config(ep, tp, dispatcher, etp=1, **changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        moe_ffn_hidden_size=FFN,
        **changes,
    )


def _layer(gate, ep, tp=1, dispatcher="alltoall", slots=0, hooks=(), stock=False, paired=False):
    """Builds a layer; its weights depend on logical expert and name alone."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    from megatron_resilient.config import GateConfig
    from megatron_resilient.mcore.experts import slot_parameters
    from megatron_resilient.mcore.gates.build import router_builder
    from megatron_resilient.mcore.layer_hooks import LayerHooks
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
    from megatron_resilient.mcore.parted_layer import PartedMoELayer

    if paired:
        hooks = (LayerHooks(None, twice, half, half, twice, None),)
    router = router_builder(GateConfig(gate=gate), LENGTH, EXPERTS, TOPK)
    experts = LocalSpecProvider().grouped_mlp_modules(False)
    options = {"experts": experts} | ({} if router is None else {"router": router})
    common = {"config": _config(ep, tp, dispatcher), "submodules": MoESubmodules(**options)}
    if slots:
        # Neighbouring ranks share experts, each of which is somewhere.
        stride = EXPERTS // ep
        holding = [[(stride * r + i) % EXPERTS for i in range(slots)] for r in range(ep)]
        layer = ReplicatedMoELayer(
            **common, slots_per_rank=slots, first_holding=holding, hooks=hooks
        )
        held = holding[dist.get_rank(layer.ep_group)]
    else:
        layer = MoELayer(**common) if stock else PartedMoELayer(**common, hooks=hooks)
        held = layer.local_expert_indices
    layer.set_layer_number(1)
    with torch.no_grad():
        for kind, parameters in slot_parameters(layer.experts, len(held)).items():
            for expert, parameter in zip(held, parameters, strict=True):
                parameter.copy_(_drawn(parameter.shape, f"{kind} {expert}"))
        for name, parameter in layer.router.named_parameters():
            if name != "log_temperature":
                parameter.copy_(_drawn(parameter.shape, name))
    return layer


def _drawn(shape, name):
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _data(tp):
    """Returns this rank's (tokens, targets), [sequences, its part of one, 1, hidden] each.

    They are of the same four sequences in every layout.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    part = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(5)
    both = torch.randn((2, SEQUENCES, LENGTH, 1, HIDDEN), generator=generator)
    own = both[:, rank * SEQUENCES // ranks : (rank + 1) * SEQUENCES // ranks]
    rows = LENGTH // tp
    return own[:, :, part * rows : (part + 1) * rows].contiguous()


def _sum_gradients(layer):
    """Does what DDP, Megatron's sum over tensor-parallel ranks and that over replicas do."""
    from megatron.core import parallel_state

    from megatron_resilient.comm.replica_sum import ReplicaSum

    for parameter in layer.router.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    for parameter in layer.experts.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=parallel_state.get_expert_data_parallel_group())
    if hasattr(layer, "holding"):
        kinds = list(layer.parameters_by_kind().values())
        ReplicaSum([layer.holding] * len(kinds), [ps[0].numel() for ps in kinds], layer.ep_group)(
            [p.grad for ps in kinds for p in ps]
        )
