"""Sends slices of the dense gradients while the backward pass is in an MoE layer.

FSMoE (arXiv 2501.10714), section 5: the link between nodes idles between the dispatches and the
combines of an MoE layer's backward pass, and beside the dense work after it. What may be sent there
is planned in bytes (`algorithms/gradient_partition.py`) and becomes ranges of elements of
Megatron's gradient buffers (`algorithms/gradient_slices.py`), the same on all ranks. A range is
scaled and summed in place, as Megatron would at the end; at the end Megatron's own reduction of a
bucket is replaced by that of the ranges that have not been sent.

Slices are of dense parameters. Those of experts lie in buffers of their own, which Megatron reduces
as ever. Sums of replicas' gradients can be made in the same windows, whole (`send_ready` of
`replica_gradients.py`): so the tokens of the layer do not queue behind them.

The sums use the dense data-parallel group. Nothing else does during a backward pass, so the order
of its collectives is the order of the windows, which follows from the model.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_model_config
from torch import nn

from megatron_resilient.algorithms.gradient_slices import Range, Stretch, bytes_made, plan_slices
from megatron_resilient.comm.beside import Beside
from megatron_resilient.errors import ConfigError, PlanError, PlanMismatchError
from megatron_resilient.mcore.overlap.final_gradients import BELOW, lowest_layers
from megatron_resilient.mcore.overlap.slice_refusals import why_not
from megatron_resilient.mcore.overlap.sliced_bucket import SlicedBucket, check_local_norms
from megatron_resilient.mcore.replica_gradients import ReplicaGradients

# A window: in the MoE layer, or beside the dense work after it; and the layer's number.
_IN_MOE, _BESIDE_DENSE = 0, 1
_Window = tuple[int, int]


class GradientSlices:
    """The dense gradients of a rank, of which parts can be sent before the backward pass is over.

    Nothing is changed and nothing costs anything until `set_windows` asks for slices.

    Args:
        model: the model chunks of this rank, wrapped by Megatron's DistributedDataParallel; the sum
            over replicas, if there are any, is set up already.

    Raises:
        ConfigError: a flag that slices do not go together with.
    """

    def __init__(self, model: Sequence[nn.Module]) -> None:
        for chunk in model:
            if not isinstance(chunk, DistributedDataParallel):
                raise ConfigError(
                    f"gradient slices need Megatron's DistributedDataParallel, not "
                    f"{type(chunk).__name__}: drop --use-megatron-fsdp or --use-torch-fsdp2"
                )
            why = why_not(chunk.config, chunk.ddp_config)
            if why is not None:
                raise ConfigError(f"no gradient slices with {why}")
        finalize = get_model_config(model[0]).finalize_model_grads_func
        self._replicas = finalize if isinstance(finalize, ReplicaGradients) else None
        self._last_layer: int = model[0].config.num_layers
        self._buckets = [
            SlicedBucket(chunk, group, bucket)
            for chunk in reversed(model)  # as the backward pass meets them
            for group in chunk.bucket_groups
            for bucket in group.buckets
        ]
        self._layers = {
            module.layer_number: module
            for chunk in model
            for module in chunk.modules()
            if isinstance(module, MoELayer)
        }
        lowest = lowest_layers(model)
        self._stretches: dict[nn.Parameter, Stretch] = {
            parameter: Stretch(Range(k, start, stop), bucket.data.element_size(), lowest[parameter])
            for k, bucket in enumerate(self._buckets)
            for start, stop, parameter in bucket.parameters()
            if lowest[parameter] != BELOW
        }
        self._plan: dict[_Window, list[Range]] = {}
        self._passes: dict[_Window, int] = {}  # of the backward pass through each, in this step
        self._hooks: list[Any] = []
        self._beside: Beside | None = None

    @property
    def sent_bytes(self) -> int:
        """What this rank sent before the end of the backward pass, in the last step."""
        return sum(bucket.last_sent_bytes for bucket in self._buckets)

    def bytes_made(self) -> dict[int, int]:
        """Returns the bytes that become final after each MoE layer of this rank, by its number."""
        return bytes_made(self._stretches.values(), self._layers)

    def set_windows(
        self,
        in_moe: Mapping[int, int],
        beside_dense: Mapping[int, int] | None = None,
        *,
        replicas: bool = False,
    ) -> None:
        """Says what may be sent in which window from the next step on. Between two steps.

        All ranks of the dense data-parallel group must say the same. It is local and cheap:
        O(parameters).

        Args:
            in_moe: bytes by the number of the MoE layer, layers counted from 1 over all pipeline
                stages: between its dispatches and its combines, if the layer calls its window.
            beside_dense: bytes by the number of an MoE layer: after its backward pass, beside what
                comes then, on a thread or a stream of its own. The layer calls nothing for it.
            replicas: whether gradients of replicas are summed in the windows of MoE layers, as soon
                as they are final, before the slices. All MoE layers then have a window. Without
                replicas, and where these are summed late, it changes nothing.

        Layers of other stages are passed over. Without any bytes there are no slices.

        Raises:
            PlanError: negative bytes, or a layer that the model does not have.
        """
        asked = {
            (kind, layer): size
            for kind, sizes in ((_IN_MOE, in_moe), (_BESIDE_DENSE, beside_dense or {}))
            for layer, size in sizes.items()
        }
        for _, layer in asked:
            if not 1 <= layer <= self._last_layer:
                raise PlanError(
                    f"gradient slice of layer {layer}: layers are 1 to {self._last_layer}"
                )
        windows = sorted(
            (window for window in asked if window[1] in self._layers), key=lambda w: (-w[1], w[0])
        )
        planned = plan_slices(self._stretches.values(), [(w[1], asked[w]) for w in windows])
        self.close()
        self._plan = {w: ranges for w, ranges in zip(windows, planned, strict=True) if ranges}
        if replicas and self._replicas is not None:
            self._replicas.in_windows = True
            self._plan = {(_IN_MOE, layer): [] for layer in self._layers} | self._plan
        if not self._plan:
            return
        for bucket in self._buckets:
            bucket.group.gradient_slices = self  # the patch core.start-grad-sync asks for it
        self._beside = Beside(self._buckets[0].data.device)
        me = weakref.ref(self)
        for kind, layer in self._plan:
            if kind == _BESIDE_DENSE:
                watch = partial(_watch, me, (kind, layer))
                self._hooks.append(self._layers[layer].register_forward_pre_hook(watch))
        for parameter, stretch in self._stretches.items():
            if any(_overlap(stretch.elements, r) for rs in self._plan.values() for r in rs):
                guard = partial(_guard, me, stretch.elements)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(guard))

    def window(self, layer_number: int) -> Callable[[], int] | None:
        """Returns what an MoE layer calls between dispatches and combines of its backward pass.

        It is to be called once in every backward pass of the layer, in any thread or on any stream
        that comes after the backward pass of the layers above; it returns when the slice is sent.
        Collective over the dense data-parallel group. To be asked for again after `set_windows`.

        Args:
            layer_number: of the layer.

        Returns:
            What sends the slice and returns its bytes; None where nothing is sent.
        """
        window = (_IN_MOE, layer_number)
        return partial(_enter, weakref.ref(self), window) if window in self._plan else None

    def close(self) -> None:
        """Takes back all that `set_windows` did: Megatron reduces gradients alone again."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            bucket.group.gradient_slices = None
        if self._replicas is not None:
            self._replicas.in_windows = False
        self._hooks, self._plan, self._passes, self._beside = [], {}, {}, None

    def enter(self, window: _Window) -> int:
        """Sends the slice of a window, if it is the step's last pass through it.

        Returns:
            Its bytes; 0 if something else had to be waited for or sent too, so that its time says
            nothing about them.

        Raises:
            PlanMismatchError: there are more passes than Megatron said.
        """
        if window not in self._plan or not self._is_last(window):  # asked for under an older plan
            return 0
        is_alone = not self._beside_dense().is_waited_for
        self._beside_dense().join()
        if self._replicas is not None and self._replicas.in_windows:
            is_alone = False
            self._replicas.send_ready()
        ranges = self._plan[window]
        _send(self._buckets, ranges)
        if not is_alone:
            return 0
        return sum(
            (each.stop - each.start) * self._buckets[each.buffer].data.element_size()
            for each in ranges
        )

    def start_beside(self, window: _Window) -> None:
        """Starts to send the slice of a window beside dense work, if it is the last pass."""
        if self._is_last(window):
            # The thread may hang in a collective when the model is torn down: no `self` in it.
            buckets, ranges = self._buckets, self._plan[window]
            self._beside_dense().start(lambda: _send(buckets, ranges))

    def guard(self, elements: Range) -> None:
        """Hears that a gradient has been added to.

        Raises:
            PlanMismatchError: it has been sent already.
        """
        bucket = self._buckets[elements.buffer]
        for start, stop in bucket.sent:
            if start < elements.stop and elements.start < stop:
                raise PlanMismatchError(
                    f"a gradient of {elements.stop - elements.start} elements was added to after "
                    "it had been sent: this is a defect, please report it; train without gradient "
                    "slices until it is mended"
                )

    def finish(self, group: Any) -> bool:
        """Reduces what windows have not sent of a bucket group. Collective.

        Args:
            group: Megatron's bucket group, at the end of the backward pass.

        Returns:
            Whether it did; False if nothing of the group was sent.
        """
        self._passes = {}
        self._beside_dense().join()
        own = [bucket for bucket in self._buckets if bucket.group is group]
        for bucket in own:
            bucket.note_sent()
        if not any(bucket.sent for bucket in own):
            return False
        with torch.no_grad():
            check_local_norms(group, own)
            for bucket in own:
                for start, stop in bucket.rest():
                    bucket.reduce(start, stop)
                bucket.forget()
        return True

    def _is_last(self, window: _Window) -> bool:
        passes = self._passes[window] = self._passes.get(window, 0) + 1
        microbatches = get_num_microbatches()
        if passes > microbatches:
            raise PlanMismatchError(
                f"layer {window[1]}: {passes} backward passes in a step of {microbatches} "
                "microbatches: this is a defect, please report it"
            )
        # Where all ranks shall have all gradients in this step, Megatron does it alone.
        return passes == microbatches and not self._buckets[0].chunk.force_all_reduce

    def _beside_dense(self) -> Beside:
        assert self._beside is not None
        return self._beside


def _send(buckets: Sequence[SlicedBucket], ranges: Sequence[Range]) -> None:
    with torch.no_grad():
        for each in ranges:
            buckets[each.buffer].reduce(each.start, each.stop)


def _overlap(one: Range, other: Range) -> bool:
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop


# What autograd, parameters and layers keep must not keep the slices: a circle through C++ is none
# that the garbage collector can see.
_Weak = weakref.ReferenceType["GradientSlices"]


def _enter(slices: _Weak, window: _Window) -> int:
    alive = slices()
    return 0 if alive is None else alive.enter(window)


def _start_beside(slices: _Weak, window: _Window) -> None:
    alive = slices()
    if alive is not None:
        alive.start_beside(window)


def _guard(slices: _Weak, elements: Range, _: torch.Tensor) -> None:
    alive = slices()
    if alive is not None:
        alive.guard(elements)


def _watch(slices: _Weak, window: _Window, layer: nn.Module, inputs: tuple) -> None:
    """Has the slices told when the backward pass of this forward pass leaves the layer."""
    hidden = inputs[0]
    if layer.training and torch.is_grad_enabled() and hidden.requires_grad:
        hidden.register_hook(lambda _: _start_beside(slices, window))
