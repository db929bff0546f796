"""Where the dense gradients of a backward pass are sent: slices in the gaps of other work.

The backward pass is a row of windows. Every MoE layer is one: between its dispatches and its
combines the link between nodes may carry a slice. The dense work after it is another, in which that
link has nothing to do. After the last window comes what nothing hides. A gradient can only be sent
in windows after the one that made it, and every slice pays the AllReduce's alpha.

FSMoE (arXiv 2501.10714), section 5, in two steps as there: free room is filled first, as early as
possible; then what is left is distributed. That second step is dynamic programming over units of
bytes here, instead of a random search: every rank finds the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.algorithms.pipelining import PhaseOptions
from megatron_resilient.errors import PlanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Units that the bytes left over are cut into. Only which way each window is run depends on them:
# with the ways known, rooms are filled to the byte.
UNITS = 96


@dataclass(frozen=True)
class Window:
    """A time in which a slice can be sent, in one of K ways to run what it is hidden behind.

    With a slice of g milliseconds, way k takes `max(floor_ms[k], base_ms[k] + g)`.

    Attributes:
        floor_ms: [K].
        base_ms: [K].
    """

    floor_ms: tuple[float, ...]
    base_ms: tuple[float, ...]

    @classmethod
    def of_moe(cls, options: PhaseOptions) -> "Window":
        """Returns the window of an MoE layer's backward pass."""
        # With a slice only a way with less traffic can be better than a faster one.
        floors, bases = [], []
        least = math.inf
        for way in np.lexsort((options.inter_ms, options.floor_ms)):
            if options.inter_ms[way] < least:
                least = float(options.inter_ms[way])
                floors.append(float(options.floor_ms[way]))
                bases.append(least)
        return cls(tuple(floors), tuple(bases))

    @classmethod
    def of_dense(cls, time_ms: float) -> "Window":
        """Returns the window of work that sends nothing between nodes."""
        return cls((time_ms,), (0.0,))

    @property
    def room_ms(self) -> float:
        """How long a slice may be that costs nothing."""
        best = min(self.floor_ms)
        rooms = zip(self.floor_ms, self.base_ms, strict=True)
        return max(floor - base for floor, base in rooms if floor == best)

    def best_way(self, slice_ms: float) -> "Window":
        """Returns the window with only the best way for a slice; of equals, the roomiest."""
        times = (max(f, b + slice_ms) for f, b in zip(self.floor_ms, self.base_ms, strict=True))
        _, base, floor = min(zip(times, self.base_ms, self.floor_ms, strict=True))
        return Window((floor,), (base,))

    def exposed_ms(self, slice_ms: FloatArray) -> FloatArray:
        """Returns by how much slices prolong the window, for the best way with each, [N]."""
        floor, base = np.array(self.floor_ms)[:, None], np.array(self.base_ms)[:, None]
        times: FloatArray = np.maximum(floor, base + slice_ms).min(axis=0)
        return times - min(self.floor_ms)


AFTER_ALL = Window.of_dense(0.0)


@dataclass(frozen=True)
class Partition:
    """What is sent in every window; the last entry is what is sent after all of them.

    Attributes:
        slices_bytes: [windows + 1]; sums to all gradients.
        slices_ms: Time of each AllReduce, 0 where there is none, [windows + 1].
        exposed_ms: By how much each prolongs the backward pass, [windows + 1].
    """

    slices_bytes: tuple[int, ...]
    slices_ms: tuple[float, ...]
    exposed_ms: tuple[float, ...]


def partition_gradients(
    windows: Sequence[Window],
    made_bytes: Sequence[int],
    allreduce: LinearCost,
    units: int = UNITS,
) -> Partition:
    """Distributes gradients over windows such that they prolong the backward pass least.

    The first step is optimal as far as it goes: bytes in free room cost nothing and leave later
    room to others, so some best distribution has at least as much in every window. The second is
    optimal among slices in whole units; then the rooms of the ways that it chose are filled to the
    byte. What is lost to units is below one unit per window. O(W U^2) for W windows and U units.

    Args:
        windows: In the order of the backward pass, [W].
        made_bytes: Gradient bytes that are there once each window is over, [W].
        allreduce: Cost of a slice by its bytes.
        units: Into how many the bytes without free room are cut.

    Returns:
        The slices.

    Raises:
        PlanError: Negative bytes.
    """
    for index, made in enumerate(made_bytes):
        if made < 0:
            raise PlanError(f"gradients of window {index} are {made} bytes: must be >= 0")
    slices, slack = fill_free_room(windows, made_bytes, allreduce)
    left = sum(made_bytes) - sum(slices)
    if left:
        more = _distribute(windows, slices, slack, left, allreduce, units)
        slices = [own + other for own, other in zip(slices, more, strict=True)]
        ways = [
            window.best_way(allreduce.time_ms(own))
            for window, own in zip(windows, slices, strict=True)
        ]
        refilled, _ = fill_free_room(ways, made_bytes, allreduce)
        options = [partition_of(windows, own, made_bytes, allreduce) for own in (slices, refilled)]
        return min(options, key=lambda own: sum(own.exposed_ms))
    return partition_of(windows, slices, made_bytes, allreduce)


def partition_of(
    windows: Sequence[Window],
    slices: Sequence[int],
    made_bytes: Sequence[int],
    allreduce: LinearCost,
) -> Partition:
    """Returns what slices that were chosen take; what is in none of them is sent after all."""
    all_slices = (*slices, sum(made_bytes) - sum(slices))
    times = tuple(allreduce.time_ms(own) for own in all_slices)
    exposed = tuple(
        float(window.exposed_ms(np.array([time]))[0])
        for window, time in zip((*windows, AFTER_ALL), times, strict=True)
    )
    return Partition(all_slices, times, exposed)


def fill_free_room(
    windows: Sequence[Window], made_bytes: Sequence[int], allreduce: LinearCost
) -> tuple[list[int], list[int]]:
    """Fills room that costs nothing, as early as possible: the paper's first step.

    Returns:
        Bytes per window, and how many more could have been sent up to each window.
    """
    slices, waiting, slack = [], 0, []
    for window, made in zip(windows, made_bytes, strict=True):
        room = min(allreduce.units_within(window.room_ms), float(waiting))
        slices.append(int(room))
        waiting -= slices[-1]
        slack.append(waiting)
        waiting += made
    # What is sent early cannot be in a later slice: a shortage later binds all before it.
    for index in range(len(slack) - 1, 0, -1):
        slack[index - 1] = min(slack[index - 1], slack[index])
    return slices, slack


def _distribute(
    windows: Sequence[Window],
    slices: Sequence[int],
    slack: Sequence[int],
    left: int,
    allreduce: LinearCost,
    units: int,
) -> list[int]:
    """Returns how many of the bytes that are left go into each window; the others go after all.

    `best[x]` is the least exposed time of the windows so far with x units in them. The last unit is
    what is left of the bytes, so that all can be sent in windows and none has to be after all.
    """
    unit = -(-left // units)
    units = -(-left // unit)
    counts = np.arange(units + 1)
    sent = np.minimum(counts * unit, left)
    shifted = counts[:, None] - counts  # units before the window, by units after it and in it
    possible = shifted >= 0
    shifted = np.where(possible, shifted, 0)
    best = np.where(counts == 0, 0.0, np.inf)
    choices: list[IntArray] = []
    reachable = 0
    cached: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
    for window, base, most in zip(windows, slices, slack, strict=True):
        reachable = units if most >= left else most // unit
        if not reachable:
            choices.append(np.zeros(units + 1, dtype=np.int64))
            continue
        key = (id(window), base)
        if key not in cached:
            sizes = base + counts * unit
            last_sizes = sizes - np.where(counts > 0, units * unit - left, 0)
            cached[key] = (
                window.exposed_ms(_times(sizes, allreduce)),
                window.exposed_ms(_times(last_sizes, allreduce)),
            )
        whole, last = cached[key]
        size = reachable + 1
        before = best[shifted[:size, :size]]
        table = before + whole[:size]
        if reachable == units:
            table[-1] = before[-1] + last
        table = np.where(possible[:size, :size], table, np.inf)
        choice = table.argmin(axis=1)
        best = np.full(units + 1, np.inf)
        best[:size] = table[np.arange(size), choice]
        choices.append(np.pad(choice, (0, units - reachable)))
    at = int(np.argmin(best + AFTER_ALL.exposed_ms(_times(left - sent, allreduce))))
    more = []
    for choice in reversed(choices):
        before = at - int(choice[at])
        more.append(int(sent[at] - sent[before]))
        at = before
    return more[::-1]


def _times(sizes_bytes: IntArray, allreduce: LinearCost) -> FloatArray:
    times: FloatArray = np.where(
        sizes_bytes > 0, allreduce.alpha_ms + sizes_bytes * allreduce.beta, 0.0
    )
    return times
