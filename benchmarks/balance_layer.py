"""CPU seconds of one MoE layer, forward and backward, on the ranks of a pool (see balance.py)."""

import time

import numpy as np
import torch
import torch.distributed as dist

EXPERTS = 8


def measure(workloads, topk, tokens, hidden, ffn, steps, repeats, seed):
    """Returns {workload: {system: [seconds of each repeat]}} of this rank's process time.

    The systems take turns in the same processes on the same tokens and the same routing.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from benchmarks.workloads import token_counts
    from megatron_resilient.algorithms.rank_plan import plan_layers
    from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
    from tests.support import replica_probe as probe

    probe._start()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = probe._layer_config(ranks, EXPERTS, topk, "alltoall")
    config.hidden_size, config.moe_ffn_hidden_size, config.ffn_hidden_size = hidden, ffn, ffn
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(tokens, 1, hidden, generator=generator)
    upstream = torch.randn(tokens, 1, hidden, generator=generator)
    seconds = {}
    for name in workloads:
        window = list(token_counts(name, ranks, EXPERTS, tokens * topk, 20, seed))
        loads = np.sum(window, axis=(0, 1)).tolist()
        stock_slots = EXPERTS // ranks
        layers = {
            "stock": probe._layer(MoELayer, config, seed),
            "slots without replicas": probe._layer(
                ReplicatedMoELayer,
                config,
                seed,
                slots_per_rank=stock_slots,
                first_holding=np.arange(EXPERTS).reshape(ranks, -1).tolist(),
            ),
            "replicas": probe._layer(
                ReplicatedMoELayer,
                config,
                seed,
                slots_per_rank=2 * stock_slots,
                first_holding=plan_layers([loads], ranks, 1, 2 * stock_slots, 1)[0],
            ),
        }
        routes = [_route(counts[rank], tokens, topk, seed) for counts in window[:steps]]
        seconds[name] = {system: [] for system in layers}
        for repeat in range(repeats + 1):
            for system in _turn(list(layers), repeat):
                spent = _run(layers[system], routes, x, upstream)
                if repeat:  # the first round warms up
                    seconds[name][system].append(spent)
    probe._stop()
    return seconds


def _turn(names, repeat):
    return names[repeat % len(names) :] + names[: repeat % len(names)]


def _route(counts, tokens, topk, seed):
    """Returns (probs, routing map) that send the given numbers of tokens to the experts."""
    random = np.random.default_rng(seed)
    routing_map = np.zeros((tokens, len(counts)), dtype=bool)
    free = np.full(tokens, topk)
    # The hottest first: it needs the most tokens that do not have it yet.
    for expert in np.argsort(-counts):
        candidates = np.flatnonzero(free)
        order = candidates[np.lexsort((random.random(len(candidates)), -free[candidates]))]
        chosen = order[: min(counts[expert], len(order))]
        routing_map[chosen, expert] = True
        free[chosen] -= 1
    for token in np.flatnonzero(free):  # no expert may have a token twice
        spare = np.flatnonzero(~routing_map[token])
        routing_map[token, random.choice(spare, free[token], replace=False)] = True
    routing_map = torch.from_numpy(routing_map)
    return routing_map / topk, routing_map


def _run(layer, routes, x, upstream):
    dist.barrier()
    start = time.process_time()
    for probs, routing_map in routes:
        layer.route = lambda *_, p=probs, m=routing_map: (p.clone().requires_grad_(), m)
        own = x.clone().requires_grad_()
        output, _ = layer(own)
        output.backward(upstream)
    return time.process_time() - start
