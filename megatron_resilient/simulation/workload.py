"""What is trained, and on what: the given side of a simulation."""

from dataclasses import dataclass

import numpy as np

from megatron_resilient.errors import PlanError
from megatron_resilient.input_files import MOST_SLOTS


@dataclass(frozen=True)
class Workload:
    """A model on a cluster.

    Attributes:
        nodes: of the whole cluster, for which `Costs.step_seconds` holds.
        ranks_per_node: training processes of a node.
        loads: tokens of every expert in a step, [layers][experts]; layers stand for all layers of
            the model, so a few that differ are enough.
        slots_per_node: experts of a layer that a node has memory for.
        moe_layers: MoE layers of the model.
        expert_bytes: state of one expert of one layer: weights, fp32 copies and moments.
        dense_bytes: state of all that is no expert.
        microbatches: of a step; 0: as many as divide by any number of ranks.
        min_nodes: with fewer the job waits.
        distributed_optimizer: dense optimizer state is kept once, and by a guardian once more.

    Raises:
        PlanError: numbers that do not fit together.
    """

    nodes: int
    ranks_per_node: int
    loads: tuple[tuple[int, ...], ...]
    slots_per_node: int
    moe_layers: int
    expert_bytes: float
    dense_bytes: float
    microbatches: int = 0
    min_nodes: int = 1
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node, self.slots_per_node, self.moe_layers) < 1:
            raise PlanError(
                f"{self.nodes} nodes of {self.ranks_per_node} ranks and {self.slots_per_node} "
                f"slots, {self.moe_layers} MoE layers: each must be at least 1"
            )
        if self.slots_per_node % self.ranks_per_node:
            raise PlanError(
                f"{self.slots_per_node} slots of a node cannot be shared evenly by "
                f"{self.ranks_per_node} ranks"
            )
        if not self.loads or len({len(row) for row in self.loads}) != 1 or not self.loads[0]:
            raise PlanError("loads must have at least one layer, all with as many experts")
        if self.nodes * self.slots_per_node > MOST_SLOTS:
            raise PlanError(
                f"{self.nodes:,} nodes of {self.slots_per_node:,} slots: more than {MOST_SLOTS:,}"
            )
        if self.nodes * self.slots_per_node < self.experts:
            raise PlanError(
                f"{self.experts} experts do not fit into {self.nodes} nodes of "
                f"{self.slots_per_node} slots: give nodes more slots"
            )
        if self.slots_per_node > self.experts * self.ranks_per_node:
            raise PlanError(
                f"{self.slots_per_node // self.ranks_per_node} slots a rank for {self.experts} "
                "experts: a rank holds none twice"
            )
        if min(self.expert_bytes, self.dense_bytes, self.microbatches) < 0:
            raise PlanError("bytes of state and microbatches cannot be negative")
        if not 1 <= self.min_nodes <= self.nodes:
            raise PlanError(f"at least {self.min_nodes} of {self.nodes} nodes cannot be asked for")

    @property
    def experts(self) -> int:
        """Logical experts of a layer."""
        return len(self.loads[0])

    @property
    def slots_per_rank(self) -> int:
        """Slots of a rank, per layer."""
        return self.slots_per_node // self.ranks_per_node

    @property
    def full_bytes(self) -> float:
        """Bytes of a checkpoint with all experts."""
        return self.dense_bytes + self.moe_layers * self.experts * self.expert_bytes

    def relative_step(self, nodes: int) -> float:
        """Returns how long a step takes on so many nodes, in steps of the whole cluster.

        The batch stays. Without `microbatches` it is shared out evenly; with it the step is as long
        as the rank with most of them takes.
        """
        if not self.microbatches:
            return self.nodes / nodes
        ranks, all_ranks = nodes * self.ranks_per_node, self.nodes * self.ranks_per_node
        return -(-self.microbatches // ranks) / -(-self.microbatches // all_ranks)


def zipf_loads(
    layers: int, experts: int, exponent: float = 1.0, seed: int = 0, tokens: int = 1 << 20
) -> tuple[tuple[int, ...], ...]:
    """Draws loads: a layer's i-th hottest expert gets tokens like i to the power of -exponent.

    Which expert is the i-th hottest is drawn for each layer.

    Args:
        layers: MoE layers.
        experts: logical experts of each.
        exponent: 0 for even loads.
        seed: of the draw.
        tokens: of a layer, about.

    Returns:
        Tokens, [layers][experts].
    """
    draw = np.random.default_rng(seed)
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    ranked = np.maximum(1, np.round(tokens * weights / weights.sum())).astype(np.int64)
    return tuple(tuple(draw.permutation(ranked).tolist()) for _ in range(layers))
