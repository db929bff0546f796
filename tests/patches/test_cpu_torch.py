"""The CPU group's patches of torch, alone and in this process: apply, behave, revert."""

import contextlib
import functools
import multiprocessing
import queue

import pytest
import torch
import torch.distributed as dist
from megatron_resilient.patches import REGISTRY
from megatron_resilient.patches.filesystem_async import ResultQueue
from megatron_resilient.patches.torch_tensor import FACTORIES, TENSOR_FACTORIES

from megatron_resilient.errors import ConfigError
from megatron_resilient.patching import apply
from megatron_resilient.patching.registry import Registry

PATCHES = tuple(p for p in REGISTRY.patches if p.group == "cpu" and p.upstream == "torch")
CUDA_DEVICES = ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1))
# Arguments of the factories that take others than a shape.
ARGUMENTS = {
    "arange": (3,),
    "as_tensor": ([1.0, 2.0],),
    "asarray": ([1.0, 2.0],),
    "empty_like": (torch.zeros(2, 3),),
    "empty_strided": ((2, 3), (3, 1)),
    "eye": (3,),
    "full": ((2, 3), 7.0),
    "full_like": (torch.zeros(2, 3), 7.0),
    "linspace": (0, 1, 5),
    "logspace": (0, 1, 5),
    "ones_like": (torch.zeros(2, 3),),
    "rand_like": (torch.zeros(2, 3),),
    "randint": (10, (2, 3)),
    "randint_like": (torch.zeros(2, 3), 10),
    "randn_like": (torch.zeros(2, 3),),
    "randperm": (5,),
    "tensor": ([1.0, 2.0],),
    "zeros_like": (torch.zeros(2, 3),),
    "new_full": ((2, 3), 7.0),
    "new_tensor": ([1.0, 2.0],),
}


def held(target: str):
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), __import__(module, fromlist=["x"]))


@pytest.fixture
def cpu():
    """The patches in force; afterwards every name holds the object that it held before."""
    names = [name for patch in PATCHES for name in (patch.target, *patch.bound_in)]
    before = {name: held(name) for name in names}
    available = torch.cuda.is_available()
    with apply.patched(("cpu",), registry=Registry(PATCHES, alias_roots=())):
        assert not [name for name in names if held(name) is before[name]]
        assert torch.cuda.is_available() == available
        yield
    assert not [name for name in names if held(name) is not before[name]]


def test_factories_make_cpu_tensors(cpu):
    for name in FACTORIES:
        for device in CUDA_DEVICES:
            made = getattr(torch, name)(*ARGUMENTS.get(name, ((2, 3),)), device=device)
            assert made.device == torch.device("cpu"), (name, device)


def test_factories_of_tensors_make_cpu_tensors(cpu):
    for name in TENSOR_FACTORIES:
        arguments = ARGUMENTS.get(name, ((2, 3),))
        made = getattr(torch.zeros(1), name)(*arguments, device="cuda", dtype=torch.float16)
        assert (made.device, made.dtype) == (torch.device("cpu"), torch.float16), name


def test_factories_keep_what_is_not_cuda(cpu):
    assert torch.empty(2, device="meta").device.type == "meta"
    made = torch.full((2,), 3, dtype=torch.int32, device="cuda", requires_grad=False)
    assert made.tolist() == [3, 3]
    assert made.dtype == torch.int32
    assert torch.ones(2, device="cuda", pin_memory=True, requires_grad=True).requires_grad
    assert torch.tensor(5).item() == 5


def test_a_tensor_in_the_place_of_a_device_is_none(cpu):
    """`Tensor.type` is a method: what looks like `device.type` may not be taken for one."""
    values, like = torch.ones(2), torch.zeros(1, dtype=torch.float64)
    assert values.to(like).dtype == torch.float64


def test_to_and_cuda_stay_on_the_cpu(cpu):
    tensor = torch.ones(2)
    for device in (*CUDA_DEVICES, 0, 1):
        assert tensor.to(device) is tensor
        assert tensor.to(device=device if type(device) is not int else "cuda") is tensor
        assert tensor.to(device, torch.float16).dtype == torch.float16
    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to("meta").device.type == "meta"
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert tensor.record_stream(torch.cuda.Stream()) is tensor


def test_type_says_cuda(cpu):
    for dtype, kind in {
        torch.float32: "FloatTensor",
        torch.float16: "HalfTensor",
        torch.bfloat16: "BFloat16Tensor",
        torch.int64: "LongTensor",
    }.items():
        assert torch.ones(2, dtype=dtype).type() == f"torch.cuda.{kind}"
        assert torch.ones(2).type(f"torch.cuda.{kind}").dtype == dtype
        assert torch.ones(2).type(dtype).dtype == dtype
    assert torch.nn.Parameter(torch.ones(2)).type() == "torch.cuda.FloatTensor"


def test_type_is_honest_again_afterwards():
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_cuda_answers_for_the_cpu(cpu):
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.cuda.device_count() == 1
    assert torch.cuda.set_device(3) is None
    assert torch.cuda.get_device_properties(0).total_memory > 2**20
    assert torch.cuda.get_device_properties("cuda").multi_processor_count >= 1
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_name() == "cpu"
    assert torch.cuda.synchronize() is None
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
    assert torch.cuda.memory_stats() == {}
    assert torch.cuda.empty_cache() is None


def test_streams_and_events_order_nothing(cpu):
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), None
    start.record(stream)
    with torch.cuda.stream(stream), stream:
        stream.wait_stream(torch.cuda.current_stream())
        end = stream.record_event()
    stream.wait_event(end)
    end.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert stream.device == torch.device("cpu")
    assert len(torch.cuda.Stream.priority_range()) == 2
    assert isinstance(stream, torch.cuda.Stream)


def test_one_generator_stands_for_both(cpu):
    torch.cuda.manual_seed(5)
    state, first = torch.cuda.get_rng_state(), torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.set_rng_state(state, device=0)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))  # seeds: not put off until CUDA is there
    assert called == [1]


def test_compile_returns_the_function(cpu):
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double
    assert torch.compile(double, fullgraph=True) is double


def test_process_groups_are_gloo(cpu):
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ConfigError, match=f"--distributed-backend {backend} does not run"):
            dist.init_process_group(backend)
    assert not dist.is_initialized()
    dist.init_process_group(
        store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.fixture
def results():
    with contextlib.closing(ResultQueue()) as made:
        yield made


def test_write_results_of_this_process(results):
    with pytest.raises(queue.Empty):
        results.get_nowait()
    results.put((0, "own"))
    results.put((1, "own too"))
    assert [results.get_nowait(), results.get_nowait()] == [(0, "own"), (1, "own too")]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_write_results_of_children_are_there_when_these_have_ended(results):
    """More than a pipe holds: nobody reads before the children are gone."""
    for round_number in range(2):
        children = [
            multiprocessing.get_context("fork").Process(
                target=results.put, args=((n, bytes(100_000)),)
            )
            for n in range(3)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(timeout=60)
            assert child.exitcode == 0
        results.put((9, b""))
        received = [results.get_nowait() for _ in range(4)]
        assert sorted(item[0] for item in received) == [0, 1, 2, 9], round_number
        assert max(len(item[1]) for item in received) == 100_000
        with pytest.raises(queue.Empty):
            results.get_nowait()
