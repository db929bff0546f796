"""The routed experts of one MoE layer in chunks, as one node of autograd's graph.

Forward and backward have their own chunks. The rows are therefore cut at the boundaries of both:
the experts' graph is made piece by piece, a forward chunk runs its pieces, and a backward chunk
takes the gradients of its pieces. Nothing is computed twice, whatever the two degrees are. The
experts' parameters are inputs of the one node, which returns the sum over pieces: hooks on
gradients are called once a microbatch, as with Megatron's own layer.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_pg_rank

from megatron_resilient.algorithms.row_chunks import joint_cuts, pieces_of
from megatron_resilient.comm.chunk_layout import ChunkLayout
from megatron_resilient.comm.chunked_pass import ChunkedPass, Tensors, Ways
from megatron_resilient.comm.hierarchical import Router
from megatron_resilient.comm.node_groups import NodeGroups
from megatron_resilient.comm.streams import CudaStreams, Outcome, Streams, streams_for
from megatron_resilient.mcore.overlap.plan import LayerOverlap, PassReport
from megatron_resilient.mcore.overlap.units import pass_units

# What a layer does with a piece's rows: hooks, experts, hooks.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_streams = lru_cache(streams_for)


def run_routed(
    layer: MoELayer,
    overlap: LayerOverlap,
    experts: Experts,
    rows: torch.Tensor,
    probs: torch.Tensor,
) -> torch.Tensor:
    """Sends rows to their experts and brings the outputs back; differentiable. Collective.

    Args:
        layer: with the alltoall dispatcher.
        overlap: its plans; has the counts of this microbatch, which are taken from it.
        experts: computes one piece: (rows [n, ...] sorted by slot, rows of each slot [C] on the
            CPU, probabilities [n]) to outputs [n, ...].
        rows: [rows, ...], sorted by slot.
        probs: probabilities [rows].

    Returns:
        Outputs, [rows, ...] in the order of `rows`.

    Raises:
        Exception: the first that a stage raised; the others ranks then wait for this one.
    """
    counts, overlap.rows_DS = overlap.rows_DS, None
    assert counts is not None, "dispatch_preprocess has not counted this microbatch"
    parameters = [p for p in layer.experts.parameters() if p.requires_grad]
    microbatch = _Microbatch(layer, overlap, experts, counts, parameters)
    inputs = (rows, probs, *parameters)
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        output: torch.Tensor = _Routed.apply(microbatch, *inputs)
        return output
    return microbatch.forward(rows, probs, None)


class _Routed(torch.autograd.Function):
    """The node. Its gradients are taken once; what the pieces keep is then gone."""

    @staticmethod
    def forward(
        ctx: Any,
        microbatch: "_Microbatch",
        rows: torch.Tensor,
        probs: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.microbatch = microbatch
        return microbatch.forward(rows, probs, ctx.needs_input_grad[1:3])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        microbatch, ctx.microbatch = ctx.microbatch, None
        if microbatch is None:
            raise RuntimeError(
                "gradients of an MoE layer that overlaps are taken once: retain_graph keeps nothing"
            )
        return (None, *microbatch.backward(gradient))


class _Microbatch:
    """One microbatch on its way through a layer: both passes, and what lies between them."""

    def __init__(
        self,
        layer: MoELayer,
        overlap: LayerOverlap,
        experts: Experts,
        rows_DS: np.ndarray,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        dispatcher = layer.token_dispatcher
        self._overlap, self._experts, self._parameters = overlap, experts, parameters
        self._config = layer.config
        # Backward runs the plan that forward cut for, whatever has been set meanwhile.
        self._plans = overlap.forward, overlap.backward
        joint = joint_cuts(*(plan.cuts for plan in self._plans))
        self._chunks = [pieces_of(plan.cuts, joint) for plan in self._plans]
        rank = get_pg_rank(dispatcher.tp_ep_group)
        self._layout = ChunkLayout(rows_DS, rank, dispatcher.tp_size, joint)
        if overlap.router is None:
            overlap.router = Router("direct", NodeGroups.one_node(dispatcher.ep_group))
        group = dispatcher.tp_group if dispatcher.tp_size > 1 else None
        self._ways = Ways(overlap.router, group)
        self._pieces: dict[int, tuple[Tensors, torch.Tensor]] = {}  # leaves, output
        self._needs: tuple[bool, bool] | None = None
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)
        self._caller: torch.cuda.Stream | None = None

    def forward(
        self, rows: torch.Tensor, probs: torch.Tensor, needs: tuple[bool, bool] | None
    ) -> torch.Tensor:
        """Returns outputs; keeps the graphs of pieces if `needs` says whose gradients are wanted.

        The ReduceScatter adds up in the type of probabilities, as Megatron's does.
        """
        self._needs = needs
        one = ChunkedPass(
            self._layout, self._chunks[0], self._ways, self._forward_piece, sum_dtype=probs.dtype
        )
        (output,) = self._run("forward", one, (rows.detach(), probs.detach()))
        return output

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of rows, probabilities and parameters."""
        window = self._overlap.gradient_window
        one = ChunkedPass(
            self._layout, self._chunks[1], self._ways, self._backward_piece, window=window
        )
        if gradient.is_cuda:
            self._caller = torch.cuda.current_stream(gradient.device)
        rows, probs = self._run("backward", one, (gradient,))
        needs = self._needs or (False, False)
        sums = [
            torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
            for total, parameter in zip(self._sums, self._parameters, strict=True)
        ]
        return (rows if needs[0] else None, probs if needs[1] else None, *sums)

    def _run(self, name: str, one: ChunkedPass, tensors: Tensors) -> Tensors:
        backward = name == "backward"
        has_window = backward and self._overlap.gradient_window is not None
        plan = self._plans[backward]
        schedule = plan.schedule(self._ways.tensor_group is not None, has_window)
        report = self._overlap.on_outcome
        streams: Streams = _streams(tensors[0].device)
        if isinstance(streams, CudaStreams):
            streams.timed = report is not None
        came, outcome = one.run(streams, schedule, tensors)
        if report is not None:
            report(name, self._report(one, outcome, backward))
        return came

    def _report(self, one: ChunkedPass, outcome: Outcome, backward: bool) -> PassReport:
        units = pass_units(one, self._config, self._ways, self._overlap.nodes, backward)
        if ("gradient", 0) in outcome.results:
            units["gradient", 0] = outcome.results["gradient", 0] or 0.0
        return PassReport(outcome.spans, units)

    def _forward_piece(self, piece: int, slot_rows: list[int], tensors: Tensors) -> Tensors:
        rows, probs = tensors
        slot_rows_C = torch.tensor(slot_rows)
        if self._needs is None:
            return (self._experts(rows, slot_rows_C, probs),)
        leaves = (
            rows.detach().requires_grad_(self._needs[0]),
            probs.detach().requires_grad_(self._needs[1]),
        )
        with torch.enable_grad():
            output = self._experts(leaves[0], slot_rows_C, leaves[1])
        self._pieces[piece] = leaves, output
        return (output.detach(),)

    def _backward_piece(self, piece: int, slot_rows: list[int], tensors: Tensors) -> Tensors:
        leaves, output = self._pieces.pop(piece)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        inputs = [*wanted, *self._parameters]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if output.requires_grad:
            found = torch.autograd.grad(output, inputs, tensors[0], allow_unused=True)
        for place, gradient in enumerate(found[len(wanted) :]):
            self._add(place, gradient)
        of_wanted = iter(found[: len(wanted)])
        gradients = [next(of_wanted) if leaf.requires_grad else None for leaf in leaves]
        return tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        )

    def _add(self, place: int, gradient: torch.Tensor | None) -> None:
        """Adds up a parameter's gradients over pieces, in fp32 where there is more than one."""
        if gradient is None:
            return
        total = self._sums[place]
        if total is None:
            total = gradient
        elif total.dtype.itemsize < 4:
            total = total.float() + gradient
        else:
            # The first may be autograd's own: it is not written to.
            total = total + gradient
        if self._caller is not None:
            total.record_stream(self._caller)
        self._sums[place] = total
