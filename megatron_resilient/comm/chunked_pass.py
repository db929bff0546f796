"""One pass of an MoE layer's rows to the experts and back, in chunks, on three streams.

FSMoE (arXiv 2501.10714), section 4.2: dispatch, AllGather, experts, ReduceScatter, combine. The
backward pass is the same with other tensors: its dispatch is the reverse of the forward combine,
its AllGather that of the ReduceScatter, and so on. Here chunks are uneven, and nothing is padded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_resilient.comm import exchange
from megatron_resilient.comm.blocks import Form, pack, restore, unpack
from megatron_resilient.comm.chunk_layout import Chunk, ChunkLayout, sender_order
from megatron_resilient.comm.hierarchical import Plan, Router
from megatron_resilient.comm.pipeline import Key, Schedule
from megatron_resilient.comm.streams import Outcome, Streams

Tensors = tuple[torch.Tensor, ...]
# Takes a piece's number, its rows of every slot, and its tensors, sorted by slot; returns tensors
# with the same rows.
Compute = Callable[[int, list[int], Tensors], Tensors]


@dataclass(frozen=True)
class Ways:
    """How rows travel.

    Attributes:
        router: between expert-parallel ranks.
        tensor_group: the ranks of expert tensor parallelism; None: each is alone.
    """

    router: Router
    tensor_group: dist.ProcessGroup | None


class ChunkedPass:
    """One pass over one microbatch; run once.

    Args:
        layout: where the rows are.
        chunks: the pieces of each chunk.
        ways: how they travel.
        compute: what the experts do with a piece.
        sum_dtype: in which the ReduceScatter adds up; None: in that of its tensors.
        window: what is done between all dispatches and all combines; None: nothing.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        chunks: Sequence[range],
        ways: Ways,
        compute: Compute,
        sum_dtype: torch.dtype | None = None,
        window: Callable[[], Any] | None = None,
    ) -> None:
        self._layout = layout
        self.chunks = [layout.chunk(pieces) for pieces in chunks]
        self.plans: list[Plan] = [ways.router.plan(chunk.counts_RR) for chunk in self.chunks]
        self._ways = ways
        self._compute = compute
        self.sum_dtype = sum_dtype
        self._window = window
        self._blocks: list[tuple[torch.Tensor, ...]] = []
        self.sent_forms: list[Form] = []
        self.returned_forms: list[Form] = []

    def run(
        self, streams: Streams, schedule: Schedule, tensors: Tensors
    ) -> tuple[Tensors, Outcome]:
        """Sends rows to the experts and brings back what they make of them. Collective.

        Args:
            streams: what runs the schedule.
            schedule: the operations of all chunks.
            tensors: [rows, ...] each, sorted by slot.

        Returns:
            What came back, [rows, ...] each in the same order; and the outcome of the schedule.

        Raises:
            Exception: the first that a stage raised.
        """
        self.sent_forms = [Form.of(tensor) for tensor in tensors]
        self._blocks = [tensor.split(self._layout.own_sizes) for tensor in tensors]
        outcome = streams.run(schedule, self._functions())
        self._blocks = []
        return self._put_together(outcome.results), outcome

    def _functions(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "dispatch": self._dispatch,
            "allgather": self._gather,
            "expert": self._experts,
            "reducescatter": self._scatter,
            "combine": self._combine,
            "gradient": lambda _: self._window() if self._window is not None else None,
        }

    def _dispatch(self, chunk: int) -> torch.Tensor:
        order = self.chunks[chunk].sent_order
        own = [torch.cat([blocks[place] for place in order]) for blocks in self._blocks]
        return self.plans[chunk].forward(pack(own))

    def _gather(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        return exchange.all_gather(rows, self.chunks[chunk].gathered_rows, self._tensor_group())

    def _experts(self, chunk: int, packed: torch.Tensor) -> Tensors:
        own: Chunk = self.chunks[chunk]
        tensors = unpack(packed, self.sent_forms, own.block_sizes, own.block_order)
        sizes = own.slot_rows_nC.sum(axis=1).tolist()
        by_piece = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
        made = [
            self._compute(piece, rows, parts)
            for piece, rows, parts in zip(
                own.pieces, own.slot_rows_nC.tolist(), by_piece, strict=True
            )
        ]
        together = [
            each[0] if len(each) == 1 else torch.cat(each) for each in zip(*made, strict=True)
        ]
        self.returned_forms = [Form.of(tensor) for tensor in together]
        return tuple(restore(tensor, own.block_sizes, own.block_order) for tensor in together)

    def _scatter(self, chunk: int, tensors: Tensors) -> Tensors:
        rows, group = self.chunks[chunk].gathered_rows, self._tensor_group()
        dtypes = [self.sum_dtype or tensor.dtype for tensor in tensors]
        wide = [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        if len(wide) > 1 and len(set(dtypes)) == 1:  # one message
            flat = [t.unsqueeze(1) if t.dim() == 1 else t.flatten(1) for t in wide]
            total = exchange.reduce_scatter(torch.cat(flat, dim=1), rows, group)
            sums = list(total.split([tensor.shape[1] for tensor in flat], dim=1))
        else:
            sums = [exchange.reduce_scatter(tensor, rows, group) for tensor in wide]
        return tuple(
            total.reshape(-1, *form.shape).to(form.dtype)
            for total, form in zip(sums, self.returned_forms, strict=True)
        )

    def _combine(self, chunk: int, tensors: Tensors) -> torch.Tensor:
        return self.plans[chunk].backward(pack(tensors))

    def _put_together(self, results: Mapping[Key, Any]) -> Tensors:
        sizes = [size for chunk in self.chunks for size in chunk.sent_sizes]
        came = [results["combine", chunk] for chunk in range(len(self.chunks))]
        packed = came[0] if len(came) == 1 else torch.cat(came)
        return tuple(unpack(packed, self.returned_forms, sizes, sender_order(self.chunks)))

    def _tensor_group(self) -> dist.ProcessGroup:
        assert self._ways.tensor_group is not None
        return self._ways.tensor_group
