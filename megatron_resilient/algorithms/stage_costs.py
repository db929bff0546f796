"""What the five stages of one MoE layer cost, and what one pass of it has to do."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.stream_model import STAGES

FloatArray = npt.NDArray[np.float64]

# The backward pass of an expert computes two products where the forward pass computes one.
BACKWARD_GEMMS = 2


@dataclass(frozen=True)
class LayerWork:
    """What one rank does for a generalised layer: an MoE layer and all up to the next one.

    Attributes:
        a2a_bytes: Bytes that it sends to other nodes in a dispatch, and again in a combine.
        allgather_bytes: Bytes of the AllGather inside a node; 0 where there is none.
        reducescatter_bytes: Bytes of the ReduceScatter inside a node.
        expert_flops: Floating-point operations of its experts, forward.
        gradient_bytes: Bytes of dense gradients that wait for an AllReduce once the backward pass
            is through this generalised layer.
        dense_backward_ms: The backward pass of all but the MoE layer, which comes after the MoE
            layer's own.
    """

    a2a_bytes: float
    allgather_bytes: float
    reducescatter_bytes: float
    expert_flops: float
    gradient_bytes: int = 0
    dense_backward_ms: float = 0.0


@dataclass(frozen=True)
class StageCosts:
    """A chunk with the share x of a layer takes `alpha_ms[s] + x * whole_ms[s]` in stage s.

    Attributes:
        alpha_ms: By stage, in the order of `STAGES`.
        whole_ms: By stage.
    """

    alpha_ms: tuple[float, ...]
    whole_ms: tuple[float, ...]

    @property
    def sequential_ms(self) -> float:
        """The time of all stages one after the other, uncut."""
        total = 0.0
        for alpha, whole in zip(self.alpha_ms, self.whole_ms, strict=True):
            total += alpha + whole
        return total

    def durations_ms(self, fractions: FloatArray) -> FloatArray:
        """Returns the time of every stage of every chunk.

        Args:
            fractions: Share of each chunk, zero for chunks that are not there, [B, R].

        Returns:
            Milliseconds, [5, B, R].
        """
        alpha = np.array(self.alpha_ms)[:, None, None]
        whole = np.array(self.whole_ms)[:, None, None]
        durations: FloatArray = alpha * (fractions > 0) + whole * fractions
        return durations


def stage_costs(profile: Profile, layer: LayerWork, *, backward: bool = False) -> StageCosts:
    """Returns the costs of one pass.

    Backward the experts take twice their alpha and twice their beta (FSMoE, arXiv 2501.10714,
    section 4.1); the collectives are each other's transposes and take the same. A stage without
    work takes no time at all, alpha included.
    """
    gemms = BACKWARD_GEMMS if backward else 1
    terms: dict[str, tuple[LinearCost, float, int]] = {
        "dispatch": (profile.a2a, layer.a2a_bytes, 1),
        "allgather": (profile.allgather, layer.allgather_bytes, 1),
        "expert": (profile.gemm, layer.expert_flops, gemms),
        "reducescatter": (profile.reducescatter, layer.reducescatter_bytes, 1),
        "combine": (profile.a2a, layer.a2a_bytes, 1),
    }
    alpha, whole = [], []
    for stage in STAGES:
        cost, units, times = terms[stage]
        alpha.append(times * cost.alpha_ms if units > 0 else 0.0)
        whole.append(times * cost.beta * units)
    return StageCosts(tuple(alpha), tuple(whole))
