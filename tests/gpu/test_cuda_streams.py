"""Streams on a device give what one stream gives, and memory is not taken back too early."""

import itertools

import pytest
import torch

from megatron_resilient.comm.pipeline import Schedule, same_chunk
from megatron_resilient.comm.streams import CudaStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CHUNKS = 8


def lanes():
    chunks = range(CHUNKS)
    return {
        "inter": [(n, i) for n in ("dispatch", "combine") for i in chunks],
        "intra": [(n, i) for n in ("allgather", "reducescatter") for i in chunks],
        "compute": [("expert", i) for i in chunks],
    }


def test_results_are_those_of_one_stream():
    device = torch.device("cuda", torch.cuda.current_device())
    order = ["dispatch", "allgather", "expert", "reducescatter", "combine"]
    schedule = Schedule(
        lanes(), same_chunk(lanes(), {b: [a] for a, b in itertools.pairwise(order)})
    )
    x = torch.randn(CHUNKS, 512, 512, device=device)
    w = torch.randn(512, 512, device=device) / 512**0.5
    functions = {
        "dispatch": lambda i: x[i] + i,
        "allgather": lambda i, y: torch.cat([y, y]),
        "expert": lambda i, y: (y @ w).relu() @ w,
        "reducescatter": lambda i, y: y[:512] + y[512:],
        "combine": lambda i, y: y * 2,
    }
    expected = []
    for i in range(CHUNKS):
        y = functions["dispatch"](i)
        for name in order[1:]:
            y = functions[name](i, y)
        expected.append(y)
    streams = CudaStreams(device)
    for _ in range(20):
        outcome = streams.run(schedule, functions)
        got = [outcome.results["combine", i] for i in range(CHUNKS)]
        # What is freed is asked for again and overwritten at once.
        del outcome
        torch.full((CHUNKS, 512, 512), float("nan"), device=device)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_spans_are_times_of_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = Schedule({"inter": [("a", 0)], "compute": [("b", 0)]}, {("b", 0): [("a", 0)]})
    x = torch.randn(2048, 2048, device=device)
    spans = (
        CudaStreams(device).run(schedule, {"a": lambda i: x @ x, "b": lambda i, y: y @ x}).spans()
    )
    first, second = sorted(spans, key=lambda span: span.start_seconds)
    assert first.key == ("a", 0)
    assert 0 <= first.start_seconds < first.end_seconds <= second.start_seconds + 1e-6
