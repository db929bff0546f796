"""What tests of gradient slices call on the ranks of a pool: windows in a stock model."""

import gc
import threading
import weakref
from functools import partial

import torch
import torch.distributed as dist

_UNDO = []
_FOUND = []


def slice_gradients(in_moe=0, beside_dense=0, replicas=False, broken=False, wrong=False):
    """Has the models of the next runs send slices, until `restore`.

    Windows are called as a layer of ours would: in a thread that begins when the backward pass
    comes to an MoE layer, and is waited for when it leaves it. Where replicas are summed there, it
    is waited for at once: their sums use the group of the layer's own exchanges.

    Args:
        in_moe: bytes of the window in each MoE layer.
        beside_dense: bytes of the window after each.
        replicas: whether replicas are summed in the windows too.
        broken: whether the first window raises.
        wrong: whether the plan takes all gradients for final from the first window on.
    """
    from megatron_resilient.mcore.overlap import gradient_slices, sliced_bucket

    restore()

    def attach(model):
        slices = gradient_slices.GradientSlices(model)
        layers = slices._layers
        for number, layer in layers.items():  # its thread ends before what begins after the layer
            _call_windows(layer, partial(_window, weakref.ref(slices), number), replicas)
        slices.set_windows(
            dict.fromkeys(layers, in_moe), dict.fromkeys(layers, beside_dense), replicas=replicas
        )

    _when_built(attach)
    if broken:

        def fail(self, start, stop):
            raise RuntimeError("no slice from here")

        _replace(sliced_bucket.SlicedBucket, "reduce", fail)
    if wrong:
        lowest = gradient_slices.lowest_layers
        _replace(gradient_slices, "lowest_layers", lambda m: dict.fromkeys(lowest(m), 1 << 40))


def spoil_a_gradient(rank):
    """Has one rank's own gradient of the output layer be NaN, until `restore`.

    What Megatron's check then says is kept for `found`; the run goes on.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    check = _ParamAndGradBucketGroup.check_grads
    _FOUND.clear()

    def note(self, **what):
        try:
            check(self, **what)
        except RuntimeError as error:
            _FOUND.append(str(error))

    _replace(_ParamAndGradBucketGroup, "check_grads", note)

    def attach(model):
        if dist.get_rank() == rank:
            parameters = dict(model[0].named_parameters())
            (name,) = (name for name in parameters if "output_layer" in name)
            parameters[name].register_hook(lambda gradient: gradient * float("nan"))

    _when_built(attach)


def found():
    """Returns what `spoil_a_gradient` has kept."""
    return list(_FOUND)


def _when_built(function):
    from megatron_resilient.mcore import train_hooks

    setup = train_hooks.setup

    def setup_and_more(*args, **kwargs):
        built = setup(*args, **kwargs)
        function(built[0])
        return built

    _replace(train_hooks, "setup", setup_and_more)


def restore():
    """Brings back what the program does."""
    while _UNDO:
        owner, name, value = _UNDO.pop()
        setattr(owner, name, value)


def _replace(owner, name, value):
    _UNDO.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _window(slices, number):
    alive = slices()  # the graph keeps who asks
    return None if alive is None else alive.window(number)


def _call_windows(layer, find, at_once):
    class Pass:
        """One backward pass: a thread from its first to its last node."""

        failure = None

        def begin(self, gradient):
            window = find()
            self.thread = threading.Thread(target=self.run, args=(window,), daemon=True)
            if window is not None:
                self.thread.start()
            if at_once:
                self.end(gradient)

        def run(self, window):
            try:
                window()
            except BaseException as failure:
                self.failure = failure

        def end(self, gradient):
            if self.thread.ident is not None:
                self.thread.join()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                try:
                    raise failure
                finally:
                    del failure

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
    """Returns how many slices, and sums, of a run that is over are still in memory."""
    from megatron_resilient.comm.replica_sum import RunningSum
    from megatron_resilient.mcore.overlap.gradient_slices import GradientSlices
    from megatron_resilient.mcore.overlap.sliced_bucket import SlicedBucket

    gc.collect()
    kinds = (GradientSlices, SlicedBucket, RunningSum)
    return sum(type(one) in kinds for one in gc.get_objects())


def sum_ranges(seed, ranks):
    """Sums random ranges of random buffers in both ways; returns the largest error of each."""
    import numpy as np

    from megatron_resilient.comm.range_sum import sum_at_owners, sum_everywhere

    dist.init_process_group("gloo")
    rank, worst = dist.get_rank(), [0.0, 0.0]
    random = np.random.default_rng(seed)
    for _ in range(10):
        shard = int(random.integers(1, 30))
        start, stop = sorted(int(x) for x in random.integers(0, ranks * shard + 1, 2))
        average = bool(random.integers(2))
        everyone = torch.from_numpy(random.standard_normal((ranks, ranks * shard)))
        total = everyone.sum(dim=0) / (ranks if average else 1)
        if start == stop:
            continue
        for way, function in enumerate((sum_everywhere, sum_at_owners)):
            mine = everyone[rank].clone()
            function(mine, start, stop, dist.group.WORLD, average)
            expected = everyone[rank].clone()
            first = max(start, rank * shard) if way else start
            last = min(stop, (rank + 1) * shard) if way else stop
            if first < last:
                expected[first:last] = total[first:last]
            worst[way] = max(worst[way], float((mine - expected).abs().max()))
    dist.barrier()
    dist.destroy_process_group()
    return worst
