"""What a plan learns from the passes that were looked at."""

import pytest
import torch.distributed as dist

from megatron_resilient.algorithms.cost_model import LinearCost
from megatron_resilient.comm.pipeline import Span
from megatron_resilient.mcore.overlap.observed import Pass, agree, observations, records, scaled


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_pass(layer, name, clock, scale=1.0):
    """10 ms: two chunks of dispatch, experts and combine."""
    spans = [
        Span("inter", ("dispatch", 0), 0.000, 0.002),
        Span("inter", ("dispatch", 1), 0.002, 0.004),
        Span("compute", ("expert", 0), 0.002, 0.005),
        Span("compute", ("expert", 1), 0.005, 0.008),
        Span("inter", ("combine", 0), 0.005, 0.006),
        Span("inter", ("combine", 1), 0.008, 0.010),
    ]
    units = {
        ("dispatch", 0): 100.0 * scale,
        ("dispatch", 1): 140.0 * scale,
        ("expert", 0): 1e6 * scale,
        ("expert", 1): 3e6 * scale,
        ("combine", 0): 110.0 * scale,
        ("combine", 1): 120.0 * scale,
    }
    return Pass(layer, name, spans, units, clock)


def test_work_is_that_of_a_microbatch_and_gaps_lie_between_layers():
    passes = []
    for begun in (0.0, 1.0):  # microbatches; the second has twice the tokens
        scale = 1 + begun
        passes += [a_pass(layer, "forward", begun + 0.02 * layer, scale) for layer in (1, 2, 3)]
        for layer, clock in ((3, 0.10), (2, 0.14), (1, 0.17)):
            passes.append(a_pass(layer, "backward", begun + clock, scale))
    found = agree(passes, {1: 11, 2: 22, 3: 33}, dist.group.WORLD)
    works = [own.work for own in found]
    for work, gradient_bytes in zip(works, (11, 22, 33), strict=True):
        assert work.a2a_bytes == pytest.approx(1.5 * 240)
        assert (work.allgather_bytes, work.reducescatter_bytes) == (0, 0)
        assert work.expert_flops == pytest.approx(1.5 * 4e6)
        assert work.gradient_bytes == gradient_bytes
    # Layer 2 begins 10 ms before it ends: 30 ms after layer 3; layer 1 20 ms after layer 2. The
    # lowest one has no layer below and gets their mean.
    gaps = [work.dense_backward_ms for work in works]
    assert gaps == pytest.approx([25, 20, 30])
    assert found[0].pass_seconds == pytest.approx({"forward": 0.010, "backward": 0.010})


def test_nothing_is_planned_when_nothing_ran():
    assert agree([], {1: 0, 2: 0}, dist.group.WORLD) is None


def test_a_single_layer_has_no_gap():
    (found,) = agree([a_pass(7, "backward", 0.1)], {7: 5}, dist.group.WORLD)
    assert found.work.dense_backward_ms == 0
    assert found.work.a2a_bytes == 0  # forward passes say what there is to do


def test_operations_are_compared_with_those_of_the_profile():
    seen = list(observations([a_pass(1, "forward", 0.0), a_pass(1, "backward", 0.0)]))
    forward, backward = seen[:6], seen[6:]
    assert forward[0] == pytest.approx(("a2a", 100.0, 0.002))
    assert [name for name, _, _ in forward] == ["a2a", "a2a", "gemm", "gemm", "a2a", "a2a"]
    assert forward[3] == ("gemm", 3e6, pytest.approx(0.003))
    # A backward pass of experts is two forward passes of half of it each.
    assert backward[3] == ("gemm", 1.5e6, pytest.approx(0.0015))
    assert backward[1] == ("a2a", 140.0, pytest.approx(0.002))


def test_costs_follow_what_was_seen():
    assert scaled(LinearCost(2.0, 0.5), 1.5) == LinearCost(3.0, 0.75)


def test_lanes_are_those_of_the_event():
    lanes = records(a_pass(1, "forward", 0.0))
    assert lanes["compute"] == [["expert", 0, 0.002, 0.005], ["expert", 1, 0.005, 0.008]]
    assert [one[:2] for one in lanes["inter"]] == [
        ["dispatch", 0],
        ["dispatch", 1],
        ["combine", 0],
        ["combine", 1],
    ]
