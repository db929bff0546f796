"""What the process of `fsmoe_gates.py` does: times one MoE layer of Megatron with each gate."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def times(
    gates: Sequence[str], hidden: int, ffn: int, experts: int, tokens: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Times a layer, and its gate alone, forward and backward; gates by turns.

    Args:
        gates: names of `--resilient-gate`.
        hidden: size.
        ffn: of an expert.
        experts: all on this process.
        tokens: of one sequence.
        rounds: of all gates; one more before them is not counted.

    Returns:
        By gate: milliseconds of the layer and of the gate, of every round.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    layers = {gate: _layer(gate, hidden, ffn, experts, tokens) for gate in gates}
    rows = torch.randn(tokens, 1, hidden)
    found: dict[str, dict[str, list[float]]] = {gate: {"layer": [], "gate": []} for gate in gates}
    for number in range(rounds + 1):
        first = number % len(gates)  # what runs first finds other memory in the caches
        for gate in (*gates[first:], *gates[:first]):
            layer = layers[gate]
            took = {
                "layer": _timed(lambda own, layer=layer: layer(own)[0], rows),
                "gate": _timed(lambda own, layer=layer: layer.router(own)[0], rows),
            }
            for parameter in layer.parameters():
                parameter.grad = None
            if number:
                for name, value in took.items():
                    found[gate][name].append(value)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def medians(told: dict[str, dict[str, list[float]]], name: str, to: str) -> dict[str, float]:
    """Returns the median over rounds of each gate's time, as a multiple of another's."""
    return {
        gate: statistics.median(
            own / base for own, base in zip(values[name], told[to][name], strict=True)
        )
        for gate, values in told.items()
    }


def _timed(run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    own = rows.clone().requires_grad_()
    begin = time.process_time()
    output = run(own)
    output.square().sum().backward()
    return 1e3 * (time.process_time() - begin)


def _layer(gate: str, hidden: int, ffn: int, experts: int, tokens: int) -> Any:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_resilient.config import GateConfig
    from megatron_resilient.mcore.gates.build import router_builder
    from megatron_resilient.mcore.parted_layer import PartedMoELayer

    topk = 2
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        moe_ffn_hidden_size=ffn,
    )
    router = router_builder(GateConfig(gate=gate), tokens, experts, topk)
    submodules = MoESubmodules(
        experts=LocalSpecProvider().grouped_mlp_modules(False), router=router
    )
    layer = PartedMoELayer(config=config, submodules=submodules, hooks=())
    layer.set_layer_number(1)
    return layer
