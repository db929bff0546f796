"""Sums the gradients of replicas, if possible while the backward pass still runs.

Layers go into buckets, from the last layer to the first, as the backward pass goes. When the last
microbatch has left all layers of a bucket, copies of their gradients go on their way; when the next
bucket is ready, the sums of this one go back. Megatron then finalizes all gradients as ever, and
the sums are written over them. They have the bits of a sum that begins after that: the copies are
scaled as Megatron scales the originals, and nothing else changes those.

The exchanges use the expert-parallel group, as the layers' own do. A group of its own would be one
more communicator to build whenever the world changes. All ranks of the group issue the exchanges in
one order, because they begin at one place of the autograd graph, which all of them go through:
after those of a layer and before those of the layer below. On a GPU a bucket therefore overlaps
with computation, and not with the tokens of the layer below, which queue behind it.
"""

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import nn

from megatron_resilient.algorithms.buckets import consecutive_buckets
from megatron_resilient.comm.replica_sum import ReplicaSum, RunningSum
from megatron_resilient.comm.transfer import Holding
from megatron_resilient.errors import PlanMismatchError
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer
from megatron_resilient.mcore.recovery import faults
from megatron_resilient.mcore.replica_overlap import why_late

# Gradients of all slots of a rank. A few of these hide the latency of an exchange; large layers are
# a bucket each.
BUCKET_BYTES = 32 << 20


class ReplicaGradients:
    """Megatron's finalize_model_grads, and the sum over replicas.

    Args:
        layers: the replicated layers of this rank; at least one.
        model: the model chunks, wrapped by Megatron's DistributedDataParallel.
        inner: what finalizes all gradients but for this sum.
        late: whether to sum after the backward pass only.

    Attributes:
        started_early: buckets whose sum began in the last backward pass.
        in_windows: whether the backward pass leaves sums to `send_ready`; changed between two
            steps only.
    """

    def __init__(
        self,
        layers: Sequence[ReplicatedMoELayer],
        model: Sequence[nn.Module],
        inner: Any,
        late: bool,
    ) -> None:
        self.started_early = 0
        self.in_windows = False
        self._inner = inner
        self._late = late
        ddp_groups = {
            parameter: group
            for chunk in model
            for parameter, group in chunk.param_to_bucket_group.items()
        }
        self._layers = list(reversed(layers))  # as the backward pass meets them
        sizes = [_gradient_bytes(layer) for layer in self._layers]
        numbers = consecutive_buckets(sizes, sum(sizes) if late else BUCKET_BYTES)
        self._buckets = [
            _Bucket([self._layers[i] for i in bucket], ddp_groups) for bucket in numbers
        ]
        self._passes = [0] * len(layers)  # backward passes of each layer in this step
        self._bucket_of = {i: k for k, bucket in enumerate(numbers) for i in bucket}
        self._open = [len(bucket) for bucket in numbers]  # layers that are still to come
        self._running: dict[int, RunningSum] = {}  # in the order in which they were started
        self._ready: list[int] = []  # buckets that wait for a window
        if not late:
            for number, layer in enumerate(self._layers):
                layer.register_forward_pre_hook(partial(_watch, weakref.ref(self), number))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Finalizes the gradients; the arguments are Megatron's. Collective."""
        with torch.no_grad():
            if not self._late:
                self.started_early = len(self._running)
                for number in range(len(self._buckets)):
                    if number not in self._running:  # its layers' inputs need no gradient
                        self._start(number)
                last = self._last_started()
                if not last.totals_sent:
                    last.send_totals()
            self._inner(*args, **kwargs)
            if self._late:
                for bucket in self._buckets:
                    bucket.sum_now()
            for number, running in self._running.items():
                running.finish(self._buckets[number].gradients())
        self._running, self._ready = {}, []
        self._passes = [0] * len(self._passes)
        self._open = [len(bucket.layers) for bucket in self._buckets]

    def note_pass(self, number: int) -> None:
        """Hears that a backward pass has left a layer. Collective if it was the last one.

        Raises:
            PlanMismatchError: there are more than Megatron said: some gradients were left out.
        """
        self._passes[number] += 1
        microbatches = get_num_microbatches()
        if self._passes[number] > microbatches:
            raise PlanMismatchError(
                f"layer {self._layers[number].layer_number}: {self._passes[number]} backward "
                f"passes in a step of {microbatches} microbatches: this is a defect, please report "
                "it"
            )
        if self._passes[number] == microbatches:
            bucket = self._bucket_of[number]
            self._open[bucket] -= 1
            if not self._open[bucket] and self.in_windows:
                self._ready.append(bucket)
            elif not self._open[bucket]:
                with torch.no_grad():
                    self._start(bucket)
                faults.point("replicas")

    def send_ready(self) -> None:
        """Sums the buckets that the backward pass has left. Collective; blocks until that is done.

        For windows in which the links are free: in any thread, or on any stream that comes after
        the backward pass of the layers above.
        """
        with torch.no_grad():
            for number in self._ready:
                self._start(number)
                self._last_started().send_totals()
                self._last_started().settle()
        self._ready = []

    def _start(self, number: int) -> None:
        before = self._last_started() if self._running else None
        self._running[number] = self._buckets[number].start()
        if before is not None and not before.totals_sent:
            before.send_totals()

    def _last_started(self) -> RunningSum:
        return self._running[next(reversed(self._running))]


class _Bucket:
    """Layers whose replicas are summed together.

    Args:
        layers: the layers.
        ddp_groups: Megatron's bucket group of each parameter.
    """

    def __init__(self, layers: list[ReplicatedMoELayer], ddp_groups: dict[nn.Parameter, Any]):
        self.layers = layers
        self._kinds = [layer.parameters_by_kind() for layer in layers]
        self._parameters = list(
            itertools.chain.from_iterable(p for kind in self._kinds for p in kind.values())
        )
        self._ddp_groups = [ddp_groups[parameter] for parameter in self._parameters]
        self._planned_for: list[Holding] = []
        self._plan: ReplicaSum | None = None

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self._parameters]

    def start(self) -> RunningSum:
        """Starts to sum what Megatron will have made of the gradients when it has finalized them.

        Megatron scales gradients when it reduces them, which is in the backward pass with
        --overlap-grad-reduce: then perhaps already.
        """
        scales = [
            1.0
            if group.grad_reduce_handle is not None or group.grad_reduce_finished
            else group.param_to_bucket[parameter].gradient_scaling_factor
            for parameter, group in zip(self._parameters, self._ddp_groups, strict=True)
        ]
        return self._sum().start(self.gradients(), scales)

    def sum_now(self) -> None:
        self._sum()(self.gradients())

    def _sum(self) -> ReplicaSum:
        holdings = [layer.holding for layer in self.layers]
        if self._plan is None or holdings != self._planned_for:
            self._planned_for = holdings
            self._plan = ReplicaSum(
                [h for h, kind in zip(holdings, self._kinds, strict=True) for _ in kind],
                [parameters[0].numel() for kind in self._kinds for parameters in kind.values()],
                self.layers[0].ep_group,
            )
        return self._plan


def sum_gradients_of(
    layers: list[ReplicatedMoELayer], model: list[nn.Module], model_config: Any
) -> str | None:
    """Has the gradients of replicas summed before Megatron's optimizer steps.

    Args:
        layers: the replicated layers of this rank; at least one.
        model: the model chunks.
        model_config: the configuration from which the training loop takes its functions.

    Returns:
        Why they are summed after the backward pass only; None if they are summed during it.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    inner = model_config.finalize_model_grads_func or finalize_model_grads
    chunk: Any = model[0]
    reason = why_late(model_config, chunk.ddp_config, chunk.expt_dp_group.size())
    model_config.finalize_model_grads_func = ReplicaGradients(
        layers, model, inner, late=reason is not None
    )
    return reason


def _watch(
    gradients: "weakref.ref[ReplicaGradients]", number: int, layer: nn.Module, inputs: tuple
) -> None:
    """Has the backward pass of this forward pass told, when it leaves the layer.

    The gradient of a layer's input becomes complete on every rank, also where an expert, a slot or
    the rank gets no token, since the router needs it too. Those of the weights of experts are so
    before: the autograd nodes that give them come earlier in the backward pass, and the engine adds
    the gradient of a weight to the weight before it runs any other node that is ready.

    Where activations are recomputed the first forward pass builds no graph, and the second does.
    """
    hidden = inputs[0]
    if layer.training and torch.is_grad_enabled() and hidden.requires_grad:
        # The dispatcher keeps the graph, the graph this: a strong reference would be a cycle
        # through C++, which the garbage collector cannot see.
        hidden.register_hook(lambda _: _note_pass(gradients, number))


def _note_pass(gradients: "weakref.ref[ReplicaGradients]", number: int) -> None:
    alive = gradients()
    if alive is not None:
        alive.note_pass(number)


def _gradient_bytes(layer: ReplicatedMoELayer) -> int:
    return sum(
        parameter.main_grad.nbytes
        for parameters in layer.parameters_by_kind().values()
        for parameter in parameters
    )
