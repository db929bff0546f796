"""The layer settings of the FSMoE paper, played through with the costs that it printed.

A simulation: nothing is measured here. FSMoE (arXiv 2501.10714), section 6: 1458 settings of one
transformer layer on two testbeds, and the mean speed-up over Tutel with PipeMoE's degree. What the
paper leaves open is an argument here: see `Reading`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.cost_model import LinearCost, Profile
from megatron_resilient.algorithms.gradient_partition import Window, partition_gradients
from megatron_resilient.algorithms.overlap_policies import one_stream_times, sequential_times
from megatron_resilient.algorithms.pipelining import phase_options
from megatron_resilient.algorithms.stage_costs import LayerWork, StageCosts, stage_costs
from megatron_resilient.algorithms.stream_model import (
    ALLGATHER,
    COMBINE,
    DISPATCH,
    ORDERS,
    REDUCESCATTER,
)

FloatArray = npt.NDArray[np.float64]

TOP_K = 2
MAX_DEGREE = 16
_ELEMENT_BYTES = 4  # the settings are in fp32 elements and multiply-adds
_FLOPS = 2
_GEMMS = {"simple": 2, "mixtral": 3}
# Of an attention layer: four projections, and scores and values.
_ATTENTION_GEMMS = 6

TUTEL = "Tutel + PipeMoE"
SEQUENTIAL = "no overlap"
TUTEL_IMPROVED = "Tutel, gradients beside dense work"
ONE_STREAM = "one stream, own degrees, slices"
PAPER = "FSMoE (all AllGathers first)"
OURS = "ours (best order)"
OURS_UNEVEN = "ours, uneven chunks too"
POLICIES = (SEQUENTIAL, TUTEL, TUTEL_IMPROVED, ONE_STREAM, PAPER, OURS, OURS_UNEVEN)


@dataclass(frozen=True)
class Testbed:
    """A cluster of the paper with its fitted costs, in milliseconds per element or multiply-add.

    Attributes:
        name: As in the paper.
        ranks_per_node: Which share experts and attention.
        sequence_lengths: Of its settings.
        costs: (alpha, beta) of each operation, as printed.
        printed: Mean speed-ups that the paper gives, by policy.
    """

    name: str
    ranks_per_node: int
    sequence_lengths: tuple[int, ...]
    costs: dict[str, tuple[float, float]]
    printed: dict[str, float]

    __test__ = False  # for pytest, which collects classes by their names


TESTBED_A = Testbed(
    "A",
    8,
    (512, 1024, 2048),
    {
        "gemm": (4.26e-2, 2.29e-11),
        "a2a": (2.87e-1, 2.21e-7),
        "allgather": (3.37e-1, 2.32e-6),
        "reducescatter": (3.95e-1, 2.34e-7),
        "allreduce": (5.11e-1, 4.95e-6),
    },
    {TUTEL: 1.0, TUTEL_IMPROVED: 1.09, ONE_STREAM: 1.12, PAPER: 1.18},
)
TESTBED_B = Testbed(
    "B",
    4,
    (256, 512, 1024),
    {
        "gemm": (9.24e-2, 4.42e-11),
        "a2a": (1.75e-1, 3.06e-7),
        "allgather": (3.20e-2, 1.68e-7),
        "reducescatter": (3.91e-2, 1.67e-7),
        "allreduce": (8.37e-2, 5.99e-7),
    },
    {TUTEL: 1.0, TUTEL_IMPROVED: 1.08, ONE_STREAM: 1.16, PAPER: 1.22},
)


@dataclass(frozen=True)
class Reading:
    """How to read what the paper leaves open; `tools/reproduce/fsmoe_breakdown.py` says what for.

    Attributes:
        name: In words.
        allgather_scale: What testbed A's AllGather beta is multiplied by. As printed it is ten
            times that of the ReduceScatter, which moves the same over the same links.
        allreduce_scale: The same for testbed A's AllReduce.
        whole_a2a: Whether an all-to-all carries all tokens of the ranks that share an expert, or
            each rank only its part.
        per_byte: Whether betas of communication are per byte, and not per element.
    """

    name: str = "as printed"
    allgather_scale: float = 1.0
    allreduce_scale: float = 1.0
    whole_a2a: bool = False
    per_byte: bool = False


# The first of each testbed is the printed one.
READINGS: tuple[tuple[Testbed, Reading], ...] = (
    (TESTBED_A, Reading()),
    (TESTBED_A, Reading("AllGather e-7", 0.1)),
    (TESTBED_A, Reading("AllGather, AllReduce e-7", 0.1, 0.1)),
    (TESTBED_A, Reading("whole a2a", whole_a2a=True)),
    (TESTBED_A, Reading("AllGather e-7, whole a2a", 0.1, whole_a2a=True)),
    (TESTBED_B, Reading()),
    (TESTBED_B, Reading("whole a2a", whole_a2a=True)),
    (TESTBED_B, Reading("betas per byte", per_byte=True)),
)


@dataclass(frozen=True)
class Setting:
    """One layer; `hidden_ratio` is hidden / embedding, `capacity` the factor, `ffn` the expert."""

    batch: int
    heads: int
    tokens: int
    embedding: int
    hidden_ratio: int
    capacity: float
    ffn: str


def all_settings(testbed: Testbed) -> list[Setting]:
    """Returns the 1458 settings; capacity without a limit counts as 1.0: balanced loads."""
    return [
        Setting(*values)
        for values in itertools.product(
            (1, 2, 4),
            (8, 16, 32),
            testbed.sequence_lengths,
            (1024, 2048, 4096),
            (2, 3, 4),
            (1.0, 1.2, 2.4),
            ("simple", "mixtral"),
        )
    ]


@dataclass(frozen=True)
class SettingCosts:
    """What one setting costs, in milliseconds.

    Attributes:
        forward: The MoE layer.
        backward: The same.
        dense_ms: Attention forward and backward.
        dense_backward_ms: Attention backward.
        gradient_bytes: Of the attention weights of a rank.
        allreduce: Cost of their sum.
    """

    forward: StageCosts
    backward: StageCosts
    dense_ms: float
    dense_backward_ms: float
    gradient_bytes: int
    allreduce: LinearCost


def unit_costs(testbed: Testbed, reading: Reading) -> dict[str, LinearCost]:
    """Returns the printed costs, per byte and per floating-point operation."""
    scales = {"allgather": reading.allgather_scale, "allreduce": reading.allreduce_scale}
    units = {"gemm": _FLOPS}
    element = 1 if reading.per_byte else _ELEMENT_BYTES
    return {
        name: LinearCost(alpha, beta * scales.get(name, 1.0) / units.get(name, element))
        for name, (alpha, beta) in testbed.costs.items()
    }


def setting_costs(testbed: Testbed, setting: Setting, reading: Reading) -> SettingCosts:
    """Returns the costs of a setting; section 4.1 and the authors' code for the sizes.

    The number of attention heads changes no cost of this model.
    """
    ranks = testbed.ranks_per_node
    costs = unit_costs(testbed, reading)
    gemm, gemms = costs["gemm"], _GEMMS[setting.ffn]
    profile = Profile(
        costs["a2a"],
        costs["allgather"],
        costs["reducescatter"],
        costs["allreduce"],
        replace(gemm, alpha_ms=gemms * gemm.alpha_ms),
    )
    rows = setting.batch * setting.tokens
    routed = setting.capacity * TOP_K * rows * setting.embedding
    hidden = setting.hidden_ratio * setting.embedding
    work = LayerWork(
        a2a_bytes=_ELEMENT_BYTES * routed / (1 if reading.whole_a2a else ranks),
        allgather_bytes=_ELEMENT_BYTES * routed,
        reducescatter_bytes=_ELEMENT_BYTES * routed,
        expert_flops=_FLOPS * routed * hidden * gemms / ranks,
    )
    projections = 4 * rows * setting.embedding**2 / ranks
    scores = 2 * rows * setting.tokens * setting.embedding / ranks
    computing = _ATTENTION_GEMMS * gemm.alpha_ms + gemm.beta * _FLOPS * (projections + scores)
    traffic = sum(
        costs[name].time_ms(_ELEMENT_BYTES * rows * setting.embedding)
        for name in ("allgather", "reducescatter")
    )
    return SettingCosts(
        stage_costs(profile, work),
        stage_costs(profile, work, backward=True),
        3 * computing + 2 * traffic,
        2 * computing + traffic,
        _ELEMENT_BYTES * 4 * setting.embedding**2 // ranks,
        costs["allreduce"],
    )


def layer_times(costs: Sequence[SettingCosts]) -> dict[str, FloatArray]:
    """Returns forward and backward milliseconds of every setting by policy, each [B].

    One layer of many alike: the gradient that is sent during a backward pass is that of the layer
    before, of the same size.
    """
    forward = [own.forward for own in costs]
    backward = [own.backward for own in costs]
    dense = np.array([own.dense_ms for own in costs])
    reduce = np.array([own.allreduce.time_ms(own.gradient_bytes) for own in costs])
    beside = np.array([own.dense_backward_ms for own in costs])
    times = {
        SEQUENTIAL: sequential_times(forward) + sequential_times(backward) + dense + reduce,
    }
    one_forward, one_backward = (
        one_stream_times(passes, MAX_DEGREE) for passes in (forward, backward)
    )
    # PipeMoE has one degree for both passes.
    piped = (one_forward + one_backward).min(axis=1) + dense
    times[TUTEL] = piped + reduce
    times[TUTEL_IMPROVED] = piped + np.maximum(reduce - beside, 0)
    traffic = one_stream_traffic(backward)
    windows = [
        Window(tuple(floors), tuple(bases))
        for floors, bases in zip(one_backward.tolist(), traffic.tolist(), strict=True)
    ]
    times[ONE_STREAM] = (
        one_forward.min(axis=1) + one_backward.min(axis=1) + dense + _exposed(windows, costs)
    )
    for policy, orders, uneven in (
        (PAPER, ORDERS[:1], False),
        (OURS, ORDERS, False),
        (OURS_UNEVEN, ORDERS, True),
    ):
        options = phase_options([*forward, *backward], MAX_DEGREE, orders=orders, uneven=uneven)
        best = np.array([own.best_ms for own in options])
        windows = [Window.of_moe(own) for own in options[len(costs) :]]
        times[policy] = best[: len(costs)] + best[len(costs) :] + dense + _exposed(windows, costs)
    return times


def one_stream_traffic(costs: Sequence[StageCosts]) -> FloatArray:
    """Returns the time of all communication of a pass by degree, [B, MAX_DEGREE]."""
    stages = (DISPATCH, ALLGATHER, REDUCESCATTER, COMBINE)
    alpha = np.array([[own.alpha_ms[stage] for stage in stages] for own in costs])
    whole = np.array([[own.whole_ms[stage] for stage in stages] for own in costs])
    degrees = np.arange(1, MAX_DEGREE + 1)
    traffic: FloatArray = alpha.sum(axis=1)[:, None] * degrees + whole.sum(axis=1)[:, None]
    return traffic


def _exposed(windows: Sequence[Window], costs: Sequence[SettingCosts]) -> FloatArray:
    before = Window.of_dense(0.0)  # the layer before, which made the gradient
    exposed = []
    for window, own in zip(windows, costs, strict=True):
        row = [before, window, Window.of_dense(own.dense_backward_ms)]
        found = partition_gradients(row, [own.gradient_bytes, 0, 0], own.allreduce)
        exposed.append(sum(found.exposed_ms))
    return np.array(exposed)
