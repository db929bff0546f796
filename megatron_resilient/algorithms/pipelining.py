"""Into how many chunks a pass of an MoE layer is cut, in which order, and what that takes.

Every option is played through by the stream model; nothing is rounded to powers of two and nothing
is searched, so there is no local minimum and every rank finds the same.

What makes this cheap together with gradient slices: a slice stands between the dispatches and the
combines, and nothing but the combines waits for it. So an option that takes `floor_ms` without a
slice, and whose dispatches and combines take `inter_ms` in all, takes exactly
`max(floor_ms, inter_ms + slice_ms)` with one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.chunk_shapes import UNEVEN_SHAPES, even_chunks
from megatron_resilient.algorithms.stage_costs import StageCosts
from megatron_resilient.algorithms.stream_model import COMBINE, DISPATCH, ORDERS, simulate
from megatron_resilient.errors import PlanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Uneven chunks are taken where they gain more than what the model itself is off by.
MIN_UNEVEN_GAIN = 0.01
# Times this near to each other are equal; the simpler is taken: fewer chunks, an earlier order.
_TIE = 1 + 1e-9
# Their small ends make room for some chunks more than the best even degree has.
_UNEVEN_DEGREES = (0, 1, 2, 4)


@dataclass(frozen=True)
class PhasePlan:
    """How one pass (forward or backward) of one layer runs.

    Attributes:
        degree: Chunks.
        order: Of the intra-node stream, one of `ORDERS`.
        fractions: Share of the tokens of each chunk, [degree]; sums to 1.
        predicted_ms: Time from the first dispatch to the last combine, the slice included.
        by_degree_ms: The same for the best option of each degree, [max degree].
        slice_ms: Of the gradient slice that was reckoned with.
    """

    degree: int
    order: str
    fractions: tuple[float, ...]
    predicted_ms: float
    by_degree_ms: tuple[float, ...]
    slice_ms: float

    @property
    def is_uneven(self) -> bool:
        """Whether its chunks are of unlike size."""
        return len(set(self.fractions)) > 1


@dataclass(frozen=True)
class PhaseOptions:
    """All ways to run one pass, K of them; the even ones stand first, by degree.

    Attributes:
        degrees: [K].
        orders: Index into `ORDERS` of the best order, [K].
        fractions: [K, max degree]; zero beyond the degree.
        floor_ms: Time without a gradient slice, [K].
        inter_ms: Time of all dispatches and combines, [K].
    """

    degrees: IntArray
    orders: IntArray
    fractions: FloatArray
    floor_ms: FloatArray
    inter_ms: FloatArray

    @property
    def best_ms(self) -> float:
        """The least time without a gradient slice."""
        return float(self.floor_ms.min())

    def choose(self, slice_ms: float = 0.0) -> PhasePlan:
        """Returns the best option with a gradient slice of so many milliseconds; ties by index."""
        times = np.maximum(self.floor_ms, self.inter_ms + slice_ms)
        best = int(np.argmax(times <= times.min() * _TIE))
        degree = int(self.degrees[best])
        by_degree = np.full(self.fractions.shape[1], np.inf)
        np.minimum.at(by_degree, self.degrees - 1, times)
        return PhasePlan(
            degree,
            ORDERS[self.orders[best]],
            tuple(self.fractions[best, :degree].tolist()),
            float(times[best]),
            tuple(by_degree.tolist()),
            slice_ms,
        )


def phase_options(
    costs: Sequence[StageCosts],
    max_degree: int,
    *,
    orders: Sequence[str] = ORDERS,
    uneven: bool = False,
) -> list[PhaseOptions]:
    """Plays through all degrees of all layers, in every order.

    Equal layers are done once. O(distinct layers * max_degree^2) in numpy; about 10 ms for 120
    unlike passes of up to 16 chunks.

    Args:
        costs: Of each pass.
        max_degree: Most chunks.
        orders: Orders of the intra-node stream to choose from.
        uneven: Also try chunks of unequal size, and keep those that gain at least 1 %.

    Returns:
        The options of each pass, in the order of `costs`.

    Raises:
        PlanError: `max_degree` is below 1.
    """
    if max_degree < 1:
        raise PlanError(f"max_degree is {max_degree}: it must be at least 1")
    distinct = list(dict.fromkeys(costs))
    degrees = np.tile(np.arange(1, max_degree + 1), (len(distinct), 1))
    shares = np.zeros((max_degree, max_degree))
    for degree in range(1, max_degree + 1):
        shares[degree - 1, :degree] = even_chunks(degree)
    fractions = np.broadcast_to(shares, (len(distinct), max_degree, max_degree))
    found = _play(distinct, degrees, fractions, orders)
    if uneven and max_degree > 1:
        more_degrees, more_fractions = _uneven(found, max_degree)
        more = _play(distinct, more_degrees, more_fractions, orders)
        found = [_joined(even, other) for even, other in zip(found, more, strict=True)]
    by_costs = dict(zip(distinct, found, strict=True))
    return [by_costs[own] for own in costs]


def _play(
    costs: Sequence[StageCosts], degrees: IntArray, fractions: FloatArray, orders: Sequence[str]
) -> list[PhaseOptions]:
    """Plays options [B, K] through; B layers, K options each."""
    if not costs:
        return []
    layers, options, chunks = fractions.shape
    durations = np.concatenate(
        [own.durations_ms(part) for own, part in zip(costs, fractions, strict=True)], axis=1
    )
    flat = degrees.ravel()
    floor = np.full(layers * options, np.inf)
    best_order = np.zeros(layers * options, dtype=np.int64)
    for order in orders:
        makespan = simulate(durations, flat, order).makespan_ms
        better = makespan * _TIE < floor
        floor[better] = makespan[better]
        best_order[better] = ORDERS.index(order)
    # Added up one by one, as the streams do it: then no floor is ever below its own inter_ms.
    inter = np.zeros(layers * options)
    for stage in (DISPATCH, COMBINE):
        for chunk in range(chunks):
            inter = inter + durations[stage, :, chunk]
    shape = (layers, options)
    rows = (best_order.reshape(shape), floor.reshape(shape), inter.reshape(shape))
    return [
        PhaseOptions(degrees[row], rows[0][row], fractions[row], rows[1][row], rows[2][row])
        for row in range(layers)
    ]


def _uneven(found: Sequence[PhaseOptions], max_degree: int) -> tuple[IntArray, FloatArray]:
    """Returns degrees [B, K] and fractions [B, K, R] of uneven options near the best even ones."""
    degrees, fractions = [], []
    for options in found:
        best = int(options.degrees[np.argmin(options.floor_ms)])
        tried = [min(max(best + more, 2), max_degree) for more in _UNEVEN_DEGREES]
        rows = np.zeros((len(tried) * len(UNEVEN_SHAPES), max_degree))
        for index, degree in enumerate(tried):
            for number, shape in enumerate(UNEVEN_SHAPES):
                rows[index * len(UNEVEN_SHAPES) + number, :degree] = shape(degree)
        degrees.append(np.repeat(tried, len(UNEVEN_SHAPES)))
        fractions.append(rows)
    return np.array(degrees), np.array(fractions)


def _joined(even: PhaseOptions, uneven: PhaseOptions) -> PhaseOptions:
    kept = uneven.floor_ms < (1 - MIN_UNEVEN_GAIN) * even.best_ms
    return PhaseOptions(
        np.concatenate([even.degrees, uneven.degrees[kept]]),
        np.concatenate([even.orders, uneven.orders[kept]]),
        np.concatenate([even.fractions, uneven.fractions[kept]]),
        np.concatenate([even.floor_ms, uneven.floor_ms[kept]]),
        np.concatenate([even.inter_ms, uneven.inter_ms[kept]]),
    )
