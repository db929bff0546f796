"""A model and a cluster in numbers: what docs/scale.md computes, without measuring anything.

The model is DeepSeek-V3's in the numbers that count (arXiv 2412.19437): 58 MoE layers of 256
experts of three matrices 7168 x 2048, 8 experts a token, and 17 billion parameters beside them.
"""

from dataclasses import dataclass, replace
from math import ceil, gcd


@dataclass(frozen=True)
class Model:
    """Sizes of a model; see the module."""

    moe_layers: int = 58
    experts: int = 256
    hidden: int = 7168
    expert_hidden: int = 2048
    top_k: int = 8
    dense_parameters: int = 17_000_000_000

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden * self.expert_hidden


MODEL = Model()

# Bytes of a parameter as Megatron holds it in bf16: weight, fp32 gradient, fp32 copy, two moments.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
STATE_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES
KEPT_BYTES = OPTIMIZER_BYTES  # of what moves in a recovery or goes into a save
WIRE_BYTES = 2  # of an element of a token: bf16


@dataclass(frozen=True)
class Cluster:
    """A world.

    Attributes:
        nodes: Nodes.
        stages: Pipeline-parallel size; the expert-parallel size is what is left.
        gpus: Of a node.
        slots: Expert slots of a rank in each MoE layer.
    """

    nodes: int
    stages: int = 16
    gpus: int = 8
    slots: int = 2

    @classmethod
    def of(cls, nodes: int, min_replicas: int = 2) -> "Cluster":
        """Returns a world with the fewest slots that keep `min_replicas` of each expert."""
        cluster = cls(nodes)
        return replace(cluster, slots=ceil(min_replicas * MODEL.experts / cluster.expert_ranks))

    @property
    def ranks(self) -> int:
        """Ranks that have a seat."""
        return self.expert_ranks * self.stages

    @property
    def expert_ranks(self) -> int:
        """Ranks of an expert-parallel domain: of one pipeline stage."""
        return self.nodes * self.gpus // self.stages

    @property
    def ranks_together(self) -> int:
        """Neighbouring ranks of a domain that are taken to fail together (`mcore/replicas.py`)."""
        return gcd(self.expert_ranks, self.gpus)

    @property
    def stage_layers(self) -> int:
        """MoE layers of the fullest stage."""
        return ceil(MODEL.moe_layers / self.stages)

    def without_a_node(self) -> "Cluster":
        """Returns the world after the loss of a node, slots as before or as many as it takes."""
        left = replace(self, nodes=self.nodes - 1)
        return replace(left, slots=max(self.slots, ceil(MODEL.experts / left.expert_ranks)))


def expert_bytes(cluster: Cluster) -> int:
    """Returns bytes of a rank for its slots: each holds weight, gradient and whole optimizer."""
    return cluster.slots * cluster.stage_layers * MODEL.expert_parameters * STATE_BYTES


def dense_bytes(cluster: Cluster, *, sharded: bool, mirrored: bool) -> int:
    """Returns bytes of a rank for dense state.

    Args:
        cluster: The world; parameters beside the experts are shared out over its stages.
        sharded: With the distributed optimizer: its state once over the data-parallel ranks.
        mirrored: Each shard twice, with room for the gradients that come for it.
    """
    parameters = MODEL.dense_parameters // cluster.stages
    if not sharded:
        return parameters * STATE_BYTES
    shard = parameters // cluster.expert_ranks
    beside = shard * (OPTIMIZER_BYTES + GRADIENT_BYTES) if mirrored else 0
    return parameters * (WEIGHT_BYTES + GRADIENT_BYTES) + shard * OPTIMIZER_BYTES + beside


def dispatch_bytes(tokens: int, remote_share: float = 1.0) -> float:
    """Returns bytes that a rank sends for one layer and microbatch, forward and backward.

    Four all-to-alls (dispatch and combine, and their gradients), `top_k` copies of each token.

    Args:
        tokens: Of a microbatch on a rank.
        remote_share: Share of the pairs that leave the node.
    """
    return 4 * tokens * MODEL.top_k * MODEL.hidden * WIRE_BYTES * remote_share


def counts_bytes(cluster: Cluster) -> int:
    """Returns bytes that every rank receives of count matrices, for a layer and microbatch."""
    return cluster.expert_ranks * MODEL.experts * 8


def replica_sum_bytes(cluster: Cluster) -> float:
    """Returns bytes that a rank sends in a step for the sums of its replicas' gradients.

    Each expert with r > 1 replicas: 2 (r - 1) / r of its gradient from each holder; r is the mean.
    """
    replicas = cluster.expert_ranks * cluster.slots / MODEL.experts
    if replicas <= 1:
        return 0.0
    gradients = cluster.slots * cluster.stage_layers * MODEL.expert_parameters * GRADIENT_BYTES
    return 2 * (replicas - 1) / replicas * gradients


def recovery_bytes(cluster: Cluster, lost: int) -> tuple[int, int]:
    """Returns bytes that have to be held anew after the loss of nodes, and those of one rank.

    A survivor keeps its slots, so that at least what the lost nodes held beyond the least number of
    replicas need not move. This is the upper bound: all of it is held anew, spread over all ranks.
    """
    slots = lost * cluster.gpus * cluster.slots * cluster.stage_layers
    total = slots * MODEL.expert_parameters * KEPT_BYTES
    return total, ceil(total / (cluster.ranks - lost * cluster.gpus))


def save_bytes() -> int:
    """Returns bytes of a full save: fp32 copy and two moments of every parameter once."""
    experts = MODEL.moe_layers * MODEL.experts * MODEL.expert_parameters
    return (experts + MODEL.dense_parameters) * KEPT_BYTES


def save_files(cluster: Cluster) -> int:
    """Returns files of a full save: one for each expert, one of dense state for each rank."""
    return MODEL.moe_layers * MODEL.experts + cluster.ranks


def beats_per_second(cluster: Cluster, interval_seconds: float = 1.0) -> float:
    """Returns heartbeats that reach the coordinator: of every rank, and of every node's agent."""
    return (cluster.ranks + cluster.nodes) / interval_seconds


def mesh_beats_per_second(cluster: Cluster, interval_seconds: float = 1.0) -> float:
    """Returns heartbeats if every rank told every other one: what we do not do."""
    return cluster.ranks * (cluster.ranks - 1) / interval_seconds


def group_calls(cluster: Cluster) -> int:
    """Returns the calls of `new_group` in Megatron's `initialize_model_parallel`, on every rank.

    Counted with Megatron-Core 0.19.2 at TP 1, CP 1 and 16 stages, from 128 to 8,000 ranks: eight
    groups for each rank, four for each place in a stage, eight for each stage, and three of all.
    """
    return 8 * cluster.ranks + 4 * cluster.expert_ranks + 8 * cluster.stages + 3
