"""What one MoE layer does in chunks: the plans of its two passes, and who is told of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_resilient.algorithms.chunk_shapes import even_chunks
from megatron_resilient.algorithms.intra_order import Step, intra_order
from megatron_resilient.algorithms.lanes import Operation
from megatron_resilient.algorithms.pipelining import PhasePlan
from megatron_resilient.algorithms.row_chunks import Cuts, cuts_of, even_cuts
from megatron_resilient.comm.hierarchical import Router
from megatron_resilient.comm.pipeline import COMPUTE, INTER, INTRA, Key, Schedule, Span, same_chunk
from megatron_resilient.errors import PlanError


@dataclass(frozen=True)
class PassPlan:
    """How one pass of one layer is cut and ordered (FSMoE, arXiv 2501.10714, section 4).

    Attributes:
        degree: chunks.
        fractions: share of the rows of each chunk; None: equal ones.
        order: of the intra-node stream: a name of `stream_model.ORDERS`, or every (operation,
            chunk) in turn.

    Raises:
        PlanError: shares that do not add up to 1 or are not `degree`, or an order that is none.
    """

    degree: int = 1
    fractions: tuple[float, ...] | None = None
    order: str | tuple[Step, ...] = "gather-first"
    cuts: Cuts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares = self.fractions
        if shares is None:
            object.__setattr__(self, "cuts", even_cuts(self.degree))
        else:
            if len(shares) != self.degree:
                raise PlanError(f"{len(shares)} shares for {self.degree} chunks: give one each")
            object.__setattr__(self, "cuts", cuts_of(shares))
        self.schedule(True, False)

    @classmethod
    def planned(cls, plan: PhasePlan, lanes: Mapping[str, Sequence[Operation]]) -> "PassPlan":
        """Returns what a planned pass is carried out by.

        Args:
            plan: `forward` or `backward` of a `LayerSchedule`.
            lanes: its `lanes()` of the same pass.
        """
        order = tuple((own.stage, own.chunk) for own in lanes[INTRA])
        return cls(plan.degree, plan.fractions if plan.is_uneven else None, order)

    def schedule(self, is_tensor_parallel: bool, has_window: bool) -> Schedule:
        """Returns the operations by stream; made once for equal plans.

        Args:
            is_tensor_parallel: whether there are an AllGather and a ReduceScatter.
            has_window: whether `gradient` stands between all dispatches and all combines.
        """
        return _schedule(self, is_tensor_parallel, has_window)


@lru_cache(maxsize=4096)
def _schedule(plan: PassPlan, is_tensor_parallel: bool, has_window: bool) -> Schedule:
    chunks = range(plan.degree)
    inter = [("dispatch", chunk) for chunk in chunks]
    inter += [("gradient", 0)] * has_window
    inter += [("combine", chunk) for chunk in chunks]
    lanes: dict[str, Sequence[Key]] = {INTER: inter}
    if is_tensor_parallel:
        shares = plan.fractions or tuple(even_chunks(plan.degree).tolist())
        lanes[INTRA] = intra_order(plan.order, shares)
        needs = {"allgather": ("dispatch",), "expert": ("allgather",)}
        needs |= {"reducescatter": ("expert",), "combine": ("reducescatter",)}
    else:
        needs = {"expert": ("dispatch",), "combine": ("expert",)}
    lanes[COMPUTE] = [("expert", chunk) for chunk in chunks]
    return Schedule(lanes, same_chunk(lanes, needs))


@dataclass(frozen=True)
class PassReport:
    """What one pass did and how long that took.

    Attributes:
        spans: gives when each operation ran; on CUDA it waits for the device.
        units: of each operation: bytes that this rank sent to other nodes (dispatch, combine; to
            other ranks where all are on one node or nodes are unknown), bytes of the output
            (allgather) or the input (reducescatter), floating-point operations (expert), and what
            the window returned (gradient). Those of `comm.profiler.expert_probes`.
    """

    spans: Callable[[], list[Span]]
    units: Mapping[Key, float]


class LayerOverlap:
    """The overlap of one MoE layer.

    What is set here may change between two steps only, and is the same on all ranks of the layer,
    but for `on_outcome`.

    Attributes:
        forward: plan of the forward pass.
        backward: plan of the backward pass.
        router: how rows travel between expert-parallel ranks; None: directly.
        nodes: node of each expert-parallel rank; None: unknown.
        gradient_window: called in every backward pass on the inter-node stream, after the last
            dispatch and before the first combine; what it returns is reported as its units.
        on_outcome: called after each pass with "forward" or "backward" and a `PassReport`.
        rows_DS: rows of every sender for every slot in the microbatch that is under way; set by
            what counts them, taken by the pass.
    """

    def __init__(self, forward: PassPlan | None = None, backward: PassPlan | None = None) -> None:
        """Makes one that cuts as told, or not at all."""
        self.forward = forward or PassPlan()
        self.backward = backward or PassPlan()
        self.router: Router | None = None
        self.nodes: tuple[int, ...] | None = None
        self.gradient_window: Callable[[], Any] | None = None
        self.on_outcome: Callable[[str, PassReport], None] | None = None
        self.rows_DS: np.ndarray | None = None
