"""Megatron's MoE layer seen as the parts of FSMoE (arXiv 2501.10714, section 3), with hooks.

Between what goes in and what comes out a layer has six parts. Each is one method of Megatron's
layer, which a subclass may change without knowing of the others:

| part     | method of the layer      | takes -> gives |
|----------|--------------------------|----------------|
| Gate     | `route`                  | tokens [N, B, H] -> weights and routing map [T, E] |
| Order    | `preprocess`             | tokens, weights, map -> rows sorted by expert, weights |
| Dispatch | `dispatch`               | rows, weights -> those that this rank's experts compute |
| Expert   | `routed_experts_compute` | rows, weights -> outputs, weighed |
| Combine  | `combine`                | outputs -> those of the rows that this rank sent |
| I-Order  | `postprocess`            | rows, output of shared experts -> layer's output [N, B, H] |

N tokens of a sequence on this rank, B sequences, T = N B, E experts, H hidden size. Weighing by the
gate is Expert's work with Megatron, I-Order's in the paper; sorting by local expert, and the
AllGather and ReduceScatter of expert tensor parallelism, are in Expert too.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.typed_torch import apply_module

from megatron_resilient.errors import ConfigError
from megatron_resilient.mcore import layer_hooks
from megatron_resilient.mcore.gates.expert_choice_router import ExpertChoiceRouter
from megatron_resilient.mcore.gates.soft_router import Mixture, SoftRouter
from megatron_resilient.mcore.layer_hooks import LayerHooks
from megatron_resilient.mcore.overlap.counts import count_with
from megatron_resilient.mcore.overlap.plan import LayerOverlap
from megatron_resilient.mcore.overlap.routed import run_routed

PARTS = {
    "Gate": "route",
    "Order": "preprocess",
    "Dispatch": "dispatch",
    "Expert": "routed_experts_compute",
    "Combine": "combine",
    "I-Order": "postprocess",
}


class PartedMoELayer(MoELayer):
    """An MoE layer with any gate, that calls hooks between its parts.

    Without hooks and with Megatron's router it is Megatron's layer in every bit.

    Args:
        *args: MoELayer's.
        hooks: registrations of functions, outermost first.
        overlap: plans by which rows travel and are computed in chunks; None: Megatron's way. With
            it Dispatch, Expert and Combine all happen in Expert, and the hooks between them are
            called once a piece.
        **kwargs: MoELayer's.

    Attributes:
        overlap: the same.

    Raises:
        ConfigError: a hook for the layer's start, which the 1F1B overlap does not pass.
    """

    def __init__(
        self,
        *args: Any,
        hooks: tuple[LayerHooks, ...] = (),
        overlap: LayerOverlap | None = None,
        **kwargs: Any,
    ):
        """Builds the layer; see the class."""
        super().__init__(*args, **kwargs)
        self.hooks = hooks
        self.overlap = overlap
        self._mixture: Mixture | None = None
        if self.config.overlap_moe_expert_parallel_comm and any(h.before_moe_start for h in hooks):
            raise ConfigError(
                "--overlap-moe-expert-parallel-comm: it runs a layer's parts one by one, and a "
                "hook before_moe_start would not be called; use another place"
            )
        if overlap is not None:
            self._overlap_with(overlap)
            return
        # Megatron's own gate sends each token to top-k experts, and its dispatcher counts on that.
        if isinstance(self.router, ExpertChoiceRouter | SoftRouter) and isinstance(
            self.token_dispatcher, MoEAlltoAllTokenDispatcher
        ):
            dispatcher = self.token_dispatcher
            dispatcher.preprocess = partial(_count_rows, dispatcher, dispatcher.preprocess)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ):
        """Runs the parts one after the other; see MoELayer."""
        hidden_states = self._pass("before_moe_start", hidden_states)
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ):
        """Order: see MoELayer. Of a gate that mixes tokens, what is sorted are the mixtures."""
        if isinstance(self.router, SoftRouter):
            self._mixture = self.router.take()
            hidden_states = self._mixture.tokens_R1H
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Dispatch: see MoELayer."""
        sent = self._pass("before_dispatch", hidden_states)
        if self.overlap is not None:
            return sent, probs
        arrived, probs = super().dispatch(sent, probs)
        return self._pass("after_dispatch", arrived), probs

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Expert: see MoELayer. With overlap also Dispatch and Combine, chunk by chunk."""
        if self.overlap is None:
            return super().routed_experts_compute(hidden_states, probs)
        return run_routed(self, self.overlap, self._compute_piece, hidden_states, probs), None

    def combine(self, output: torch.Tensor):
        """Combine: see MoELayer."""
        if self.overlap is not None:
            return self._pass("after_combine", output)
        sent = self._pass("before_combine", output)
        return self._pass("after_combine", super().combine(sent))

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None):
        """I-Order: see MoELayer."""
        mixture, self._mixture = self._mixture, None  # it holds a graph
        if mixture is None:
            output = super().postprocess(output, shared_expert_output)
        else:
            output = mixture.combine(super().postprocess(output, None))
            if shared_expert_output is not None:
                output = output + shared_expert_output
        return self._pass("before_moe_end", output)

    def _compute_piece(
        self, rows: torch.Tensor, slot_rows_C: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        arrived = self._pass("after_dispatch", rows)
        output, bias = apply_module(self.experts)(arrived, slot_rows_C, probs)
        assert bias is None, f"bias is not supported for {type(self.token_dispatcher)}"
        return self._pass("before_combine", output)

    def _overlap_with(self, overlap: LayerOverlap) -> None:
        dispatcher = self.token_dispatcher
        if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            raise ConfigError(
                f"layer {self.layer_number}: {type(dispatcher).__name__} cannot send in chunks; "
                "use --moe-token-dispatcher-type alltoall"
            )
        between = [h for h in self.hooks if h.after_dispatch or h.before_combine]
        if between and dispatcher.tp_size > 1:
            raise ConfigError(
                "hooks after_dispatch and before_combine in a layer that overlaps, with expert "
                f"tensor parallelism of {dispatcher.tp_size}: outputs would be added up in what "
                "the hooks make of them; pass --expert-tensor-parallel-size 1, or drop the hooks "
                "(--resilient-wire-dtype has some)"
            )
        count_with(dispatcher, overlap)

    def _pass(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        return layer_hooks.call(self.hooks, place, tensor, self)


def _count_rows(dispatcher: Any, preprocess: Any, routing_map: torch.Tensor) -> Any:
    """Counts what is sent, as Megatron does where tokens may be dropped."""
    result = preprocess(routing_map)
    dispatcher.num_out_tokens = routing_map.sum()
    # On a GPU the sum is on its way to the host when rows are sorted.
    dispatcher._maybe_update_cuda_sync_point("before_permutation_1")
    return result
