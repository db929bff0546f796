"""What planning costs at a number of nodes: the functions that every rank calls, on made-up state.

A stage of the pipeline is one expert-parallel domain, as in an elastic run. All state has the names
and the sizes that `model.py`'s model would have; nothing is allocated.
"""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.scale_model import MODEL, Cluster
from megatron_resilient.algorithms.migration import plan_migration
from megatron_resilient.algorithms.rank_plan import Holding, plan_layers
from megatron_resilient.algorithms.refill_plan import Piece, plan_refill
from megatron_resilient.algorithms.token_assignment import TokenAssignment, assign_tokens
from megatron_resilient.algorithms.write_plan import WritePlan, plan_writes

# Parameters of a layer beside its experts: attention, norms, router, shared expert.
_DENSE_NAMES = tuple(f"decoder.layers.self_attention.parameter_{n:02d}.weight" for n in range(15))
TOKENS_PER_RANK = 4096


@dataclass(frozen=True)
class Planned:
    """What planning at one size cost, in seconds of one processor, and what came out.

    Attributes:
        seconds: By name.
        remote_local: Share of token-expert pairs that leave their node, split local first.
        remote_even: The same, every expert's tokens shared evenly over its replicas.
        imbalance: Max/mean tokens of a rank, with replicas.
    """

    seconds: dict[str, float]
    remote_local: float
    remote_even: float
    imbalance: float


def zipf_loads(layers: int, experts: int, power: float = 0.6) -> list[list[int]]:
    """Returns loads of all layers: mildly unlike, in an order of its own for each."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, experts + 1) ** -power
    return [(rng.permutation(weights) * 1e7).astype(int).tolist() for _ in range(layers)]


def plan_stage(cluster: Cluster) -> Planned:
    """Plans one stage: placement, the split of tokens, the moves after the loss of a node."""
    ranks, together = cluster.expert_ranks, cluster.ranks_together
    loads = zipf_loads(cluster.stage_layers, MODEL.experts)
    seconds: dict[str, float] = {}
    slots = cluster.slots
    held = _timed(seconds, "placement", lambda: plan_layers(loads, ranks, together, slots, 2))
    table = np.asarray(held)
    tokens = _tokens(ranks, loads[0])
    split = _timed(
        seconds,
        "token split",
        lambda: assign_tokens(tokens, table[0], ranks_per_node=together),
    )
    for _ in range(3):  # the first one also has the memory made
        began = time.process_time()
        assign_tokens(tokens, table[0], ranks_per_node=together)
        seconds["token split"] = min(seconds["token split"], time.process_time() - began)
    _timed(seconds, "own part of the split", lambda: (split.sent_by(0), split.received_by(0)))
    after = cluster.without_a_node()
    wanted = _timed(
        seconds,
        "placement after a loss",
        lambda: plan_layers(loads, after.expert_ranks, after.ranks_together, after.slots, 2),
    )
    survivors = table[:, : after.expert_ranks]
    _timed(
        seconds,
        "migration",
        lambda: plan_migration(survivors, np.asarray(wanted), after.ranks_together),
    )
    nodes = np.arange(ranks) // together
    return Planned(
        seconds,
        remote_share(split, table[0], nodes),
        even_remote_share(tokens, table[0], nodes),
        split.imbalance,
    )


def _tokens(ranks: int, loads: list[int]) -> np.ndarray:
    rng = np.random.default_rng(1)
    share = np.asarray(loads) / sum(loads)
    return rng.multinomial(TOKENS_PER_RANK * MODEL.top_k, share, size=ranks)


def remote_share(split: TokenAssignment, slots: np.ndarray, nodes: np.ndarray) -> float:
    """Returns the share of pairs that leave their node, by the split that training uses."""
    width, total, near = slots.shape[1], 0, 0
    for rank in range(0, len(slots), max(1, len(slots) // 64)):  # 64 ranks stand for all
        sent = split.sent_by(rank).reshape(len(slots), width).sum(axis=1)
        total += int(sent.sum())
        near += int(sent[nodes == nodes[rank]].sum())
    return 1 - near / total


def even_remote_share(tokens: np.ndarray, slots: np.ndarray, nodes: np.ndarray) -> float:
    """Returns the same if each expert's tokens go evenly to all its replicas, near or far."""
    experts = tokens.shape[1]
    replicas = np.bincount(slots.ravel(), minlength=experts)
    near = 0.0
    for rank in range(0, len(slots), max(1, len(slots) // 64)):
        own = np.bincount(slots[nodes == nodes[rank]].ravel(), minlength=experts)
        near += float((tokens[rank] * own / np.maximum(replicas, 1)).sum()) / tokens[rank].sum()
    return 1 - near / len(range(0, len(slots), max(1, len(slots) // 64)))


def held_pieces(cluster: Cluster, sharded: bool) -> tuple[list[list[Piece]], dict[str, int]]:
    """Returns the pieces that every rank holds, and the bytes of an element of each key.

    Args:
        cluster: The world.
        sharded: With the distributed optimizer: dense state is held once, and by a guardian.
    """
    placements: list[Holding] = plan_layers(
        zipf_loads(cluster.stage_layers, MODEL.experts),
        cluster.expert_ranks,
        cluster.ranks_together,
        cluster.slots,
        2,
    )
    ranks = cluster.expert_ranks
    held: list[list[Piece]] = []
    for stage in range(cluster.stages):
        for rank in range(ranks):
            own = []
            for number, placement in enumerate(placements):
                layer = stage * cluster.stage_layers + number + 1
                own += [
                    Piece(f"expert/{layer}/{expert}/0/linear_fc{which}.weight", 0, size)
                    for expert in placement[rank]
                    for which, size in (
                        (1, MODEL.expert_parameters * 2 // 3),
                        (2, MODEL.expert_parameters // 3),
                    )
                ]
                own += _dense(stage, number, rank, ranks, sharded)
            held.append(own)
    return held, {piece.key: 12 for pieces in held for piece in pieces}


def _dense(stage: int, number: int, rank: int, ranks: int, sharded: bool) -> list[Piece]:
    names = [f"dense/{stage}.0/0/{number}.{name}" for name in _DENSE_NAMES]
    size = MODEL.dense_parameters // MODEL.moe_layers // len(names)
    if not sharded:
        return [Piece(name, 0, size) for name in names]
    # A rank's shard is a stretch of the whole buffer: of one name or two.
    pieces = []
    for owner in (rank, (rank + 8) % ranks):
        low, high = owner * size * len(names) // ranks, (owner + 1) * size * len(names) // ranks
        for place, name in enumerate(names):
            start, stop = max(low, place * size), min(high, (place + 1) * size)
            if start < stop:
                pieces.append(Piece(name, start - place * size, stop - place * size))
    return pieces


def plan_state(cluster: Cluster, sharded: bool) -> tuple[dict[str, float], WritePlan, float]:
    """Plans a recovery and a save of a whole world.

    Returns:
        Seconds by name; who writes what; bytes that a rank tells all others of what it holds.
    """
    held, element_bytes = held_pieces(cluster, sharded)
    seconds: dict[str, float] = {}
    text = json.dumps(held[0], separators=(",", ":")).encode()
    packed = zlib.compress(text, level=1)
    began = time.perf_counter()
    for _ in range(20):
        [Piece(*piece) for piece in json.loads(zlib.decompress(packed))]
    seconds["reading what a rank holds"] = (time.perf_counter() - began) / 20
    lost = 8  # the ranks of a node: new ones come in their place, and need all of it
    before = [[] if rank < lost else own for rank, own in enumerate(held)]
    nodes = [f"node{rank // 8}" for rank in range(len(held))]
    _timed(seconds, "refill plan", lambda: plan_refill(before, held, nodes))
    writes = _timed(seconds, "write plan", lambda: plan_writes(held, element_bytes))
    return seconds, writes, len(packed)


def _timed[T](seconds: dict[str, float], name: str, work: Callable[[], T]) -> T:
    began = time.process_time()
    result = work()
    seconds[name] = time.process_time() - began
    return result
