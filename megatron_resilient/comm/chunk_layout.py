"""Where the rows of every chunk are, at each stage of its way to the experts and back.

Shapes: P pieces, R expert-parallel ranks, T ranks of expert tensor parallelism, D = R T ranks that
send (rank r T + t is at r and t), C slots of a rank, S = R C slots. Rank (r, t) sends to the
expert-parallel ranks with its own t; the T ranks at r then share what they got.

Order of the rows of a chunk of n pieces, from the outside to the inside:

| where | order |
|---|---|
| at the sender | slot, piece |
| sent | receiver r, piece, its slot |
| arrived | sender r, piece, slot |
| gathered from the T ranks | t, sender r, piece, slot |
| at the experts | piece, slot, t, sender r |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_resilient.algorithms.row_chunks import Cuts, cut_rows

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunk:
    """The rows of one chunk.

    Attributes:
        pieces: of which it consists.
        sent_order: the sender's blocks (slot, piece) in the order in which they are sent, as
            slot * P + piece.
        sent_sizes: rows of each of them.
        counts_RR: rows from each expert-parallel rank to each, among those with this rank's t.
        gathered_rows: rows that each of the T ranks gives, [T].
        block_sizes: rows of the blocks as they are gathered, [T R n C].
        block_order: which of them comes first, second, ... at the experts.
        slot_rows_nC: rows of every slot in every piece.
    """

    pieces: range
    sent_order: list[int]
    sent_sizes: list[int]
    counts_RR: IntArray
    gathered_rows: list[int]
    block_sizes: list[int]
    block_order: list[int]
    slot_rows_nC: IntArray


class ChunkLayout:
    """The chunks of both passes of one layer for one microbatch. O(P D S) to build, in numpy.

    Args:
        rows_DS: rows that each rank sends to each slot; the same on every rank.
        rank: this rank, of D.
        tensor_ranks: T.
        joint: boundaries of the pieces.
    """

    def __init__(self, rows_DS: IntArray, rank: int, tensor_ranks: int, joint: Cuts) -> None:
        senders, slots = rows_DS.shape
        self._ranks, self._tensor_ranks = senders // tensor_ranks, tensor_ranks
        self._slots = slots // self._ranks
        self._at, self._t = divmod(rank, tensor_ranks)
        self._pieces_PDS = cut_rows(rows_DS, joint)
        self._own_PS = self._pieces_PDS[:, rank]

    @cached_property
    def own_sizes(self) -> list[int]:
        """Rows of this rank's blocks (slot, piece), [S P]."""
        return list(self._own_PS.T.ravel().tolist())

    def chunk(self, pieces: range) -> Chunk:
        """Returns the chunk that consists of these pieces."""
        n, ranks, slots = len(pieces), self._ranks, self._slots
        shape = (n, ranks, self._tensor_ranks, ranks, slots)
        part = self._pieces_PDS[pieces.start : pieces.stop].reshape(shape)
        arrived = part[:, :, :, self._at]  # [n, R, T, C]
        sent = np.arange(ranks * slots * len(self._pieces_PDS)).reshape(ranks, slots, -1)
        sent = sent[:, :, pieces.start : pieces.stop].transpose(0, 2, 1)
        places = np.arange(arrived.size).reshape(self._tensor_ranks, ranks, n, slots)
        return Chunk(
            pieces,
            sent.ravel().tolist(),
            part[:, self._at, self._t].transpose(1, 0, 2).ravel().tolist(),
            part[:, :, self._t].sum(axis=(0, 3)),
            arrived.sum(axis=(0, 1, 3)).tolist(),
            arrived.transpose(2, 1, 0, 3).ravel().tolist(),
            places.transpose(2, 3, 0, 1).ravel().tolist(),
            arrived.sum(axis=(1, 2)),
        )


def sender_order(chunks: Sequence[Chunk]) -> list[int]:
    """Returns the sent blocks of all chunks, one after the other, by (slot, piece) again."""
    order = [block for chunk in chunks for block in chunk.sent_order]
    return sorted(range(len(order)), key=order.__getitem__)
