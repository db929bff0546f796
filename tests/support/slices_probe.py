"""What tests of gradient slices call on the ranks of a pool: windows in a stock model."""

import gc
import threading
import weakref
from functools import partial

import torch
import torch.distributed as dist

_UNDO = []


def slice_gradients(in_moe=0, beside_dense=0, broken_rank=None, late=None):
    """Has the models of the next runs send slices, until `restore`.

    Windows are called as a layer of ours would: in a thread that begins when the backward pass
    comes to an MoE layer, and is waited for when it leaves it.

    Args:
        in_moe: bytes of the window in each MoE layer.
        beside_dense: bytes of the window after each.
        broken_rank: which rank raises in its first window.
        late: 'plan' says that all gradients are final at once, which is wrong.
    """
    from megatron_resilient.mcore import train_hooks, uneven
    from megatron_resilient.mcore.overlap import gradient_slices, sliced_bucket

    restore()
    attach = uneven.attach

    def attach_both(model):
        attach(model)
        slices = gradient_slices.GradientSlices(model)
        layers = slices._layers
        for number, layer in layers.items():  # its thread ends before what begins after the layer
            _call_windows(layer, partial(slices.window, number))
        slices.set_windows(dict.fromkeys(layers, in_moe), dict.fromkeys(layers, beside_dense))

    assert train_hooks.uneven is uneven
    _replace(uneven, "attach", attach_both)
    if broken_rank is not None:
        reduce = sliced_bucket.SlicedBucket.reduce

        def fail(self, start, stop):
            if dist.get_rank() == broken_rank:
                raise RuntimeError("no slice from here")
            reduce(self, start, stop)

        _replace(sliced_bucket.SlicedBucket, "reduce", fail)
    if late == "plan":
        lowest = gradient_slices.lowest_layers
        _replace(gradient_slices, "lowest_layers", lambda m: dict.fromkeys(lowest(m), 1 << 40))


def restore():
    """Brings back what the program does."""
    while _UNDO:
        owner, name, value = _UNDO.pop()
        setattr(owner, name, value)


def _replace(owner, name, value):
    _UNDO.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _call_windows(layer, find):
    class Pass:
        """One backward pass: a thread from its first to its last node."""

        failure = None

        def begin(self, gradient):
            window = find()
            self.thread = threading.Thread(target=self.run, args=(window,), daemon=True)
            if window is not None:
                self.thread.start()

        def run(self, window):
            try:
                window()
            except BaseException as failure:
                self.failure = failure

        def end(self, gradient):
            if self.thread.ident is not None:
                self.thread.join()
            if self.failure is not None:
                raise self.failure

    def before(_, inputs):
        if layer.training and torch.is_grad_enabled() and inputs[0].requires_grad:
            passes.append(Pass())
            inputs[0].register_hook(passes[-1].end)

    def after(_, inputs, outputs):
        if passes:
            outputs[0].register_hook(passes.pop().begin)

    passes = []
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def weights_and_bytes(model, optimizer):
    """Returns [sum of magnitudes by parameter, bytes in windows, all dense bytes]."""
    rows = [
        [name, float(parameter.detach().double().abs().sum()).hex()]
        for chunk in model
        for name, parameter in chunk.named_parameters()
    ]
    groups = [group for chunk in model for group in chunk.bucket_groups]
    slices = getattr(groups[0], "gradient_slices", None)
    dense = sum(b.grad_data.nbytes for group in groups for b in group.buckets)
    return [rows, slices.sent_bytes if slices else 0, dense]


def slices_alive():
    """Returns how many slices of a run that is over are still in memory."""
    from megatron_resilient.mcore.overlap.gradient_slices import GradientSlices

    gc.collect()
    return sum(type(one) is GradientSlices for one in gc.get_objects())


def say_nan(rank):
    """Has one rank's gradient of the last layer be NaN, until `restore`."""
    from megatron_resilient.mcore import uneven

    attach = uneven.attach

    def attach_nan(model):
        attach(model)
        if dist.get_rank() == rank:
            own = weakref.ref(model[0])

            def spoil(gradient):
                alive = own()
                return gradient * (float("nan") if alive is not None else 1.0)

            parameter = dict(model[0].named_parameters())
            name = next(n for n in parameter if "output_layer" in n)
            parameter[name].register_hook(spoil)

    _replace(uneven, "attach", attach_nan)
