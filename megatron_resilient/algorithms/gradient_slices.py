"""Which elements of the gradient buffers are sent in which window of a backward pass.

`gradient_partition` says how many bytes each window has room for; here bytes become ranges of
elements. A gradient is final at a window if its layer stands above the window's: the backward pass
has left that layer on every rank. So the ranges follow from the model alone, never from what
happens to be ready first, and all ranks send the same.

FSMoE (arXiv 2501.10714), section 5: the dense gradients, cut into slices of planned sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_resilient.errors import PlanError

# A cut inside a stretch is at a multiple of this many elements from the buffer's start: collectives
# are slower on addresses that are not aligned.
ALIGNMENT = 64


@dataclass(frozen=True)
class Range:
    """Elements `[start, stop)` of one gradient buffer.

    Attributes:
        buffer: number of the buffer.
        start: first element.
        stop: element after the last one.
    """

    buffer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Stretch:
    """Neighbouring elements whose gradients become final together.

    Attributes:
        elements: which.
        element_bytes: size of one.
        layer: the lowest layer that uses the parameters; those that are used above all layers only
            have a number above all layers'.
    """

    elements: Range
    element_bytes: int
    layer: int


def plan_slices(
    stretches: Iterable[Stretch], windows: Sequence[tuple[int, int]]
) -> list[list[Range]]:
    """Fills the windows with gradients that are final there, those of the highest layer first.

    O(S log S + S + W) for S stretches and W windows.

    Args:
        stretches: what may be sent; no element twice.
        windows: (layer, most bytes), in the order of the backward pass: layers descend. In a window
            of layer L the gradients of the layers above L are final.

    Returns:
        The ranges of each window; neighbours are joined. No element stands in two of them. Where
        less is final than a window has room for, it has less.

    Raises:
        PlanError: negative bytes, or windows out of order.
    """
    rows = sorted(
        stretches, key=lambda s: (-s.layer, s.elements.buffer, s.elements.start, s.elements.stop)
    )
    plan: list[list[Range]] = []
    row, sent, previous = 0, 0, None
    for layer, room in windows:
        if room < 0:
            raise PlanError(f"gradient slice of layer {layer} is {room} bytes: must be >= 0")
        if previous is not None and layer > previous:
            raise PlanError(
                f"window of layer {layer} after that of layer {previous}: the backward pass goes "
                "from the last layer to the first"
            )
        previous = layer
        ranges: list[Range] = []
        while row < len(rows) and rows[row].layer > layer:
            own, size = rows[row].elements, rows[row].element_bytes
            start = own.start + sent
            stop = min(own.stop, start + room // size)
            if stop < own.stop:
                stop = max(start, stop // ALIGNMENT * ALIGNMENT)
            if stop > start:
                _append(ranges, Range(own.buffer, start, stop))
                room -= (stop - start) * size
            if stop < own.stop:
                sent = stop - own.start
                break
            row, sent = row + 1, 0
        plan.append(ranges)
    return plan


def _append(ranges: list[Range], more: Range) -> None:
    last = ranges[-1] if ranges else None
    if last is not None and (last.buffer, last.stop) == (more.buffer, more.start):
        ranges[-1] = Range(last.buffer, last.start, more.stop)
    else:
        ranges.append(more)


def remaining(length: int, sent: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges of `[0, length)` that are not among those sent, ascending.

    Args:
        length: elements of the buffer.
        sent: ranges (start, stop) without overlap, in any order.
    """
    rest, at = [], 0
    for start, stop in sorted(sent):
        if at < start:
            rest.append((at, start))
        at = stop
    if at < length:
        rest.append((at, length))
    return rest


def rows_by_owner(start: int, stop: int, shard: int, owners: int) -> list[int]:
    """Returns how many elements of a range each rank keeps, where rank r keeps the r-th shard.

    Args:
        start: first element.
        stop: element after the last one.
        shard: elements of each shard.
        owners: number of shards.
    """
    return [
        max(0, min(stop, (rank + 1) * shard) - max(start, rank * shard)) for rank in range(owners)
    ]
