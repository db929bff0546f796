"""What one rank makes of its observations; deciding together is tested with several."""

import math

import pytest

from megatron_resilient.comm.drift import DriftLimits, DriftMonitor
from megatron_resilient.comm.profiler import Topology


def test_medians_forget_what_is_long_ago():
    monitor = DriftMonitor(lambda operation, units: units, limits=DriftLimits(window=5, least=3))
    for ratio in (1.0, 1.0):
        monitor.observe("a2a", 4.0, ratio * 4.0 / 1000)
    assert monitor.medians() == {}
    for ratio in (1.0, 2.0, 2.0, 2.0, 50.0):
        monitor.observe("a2a", 4.0, ratio * 4.0 / 1000)
    assert monitor.medians() == {"a2a": pytest.approx(2.0)}


def test_what_cannot_be_predicted_is_not_looked_at():
    monitor = DriftMonitor(lambda operation, units: math.nan, limits=DriftLimits(least=1))
    monitor.observe("broadcast", 4.0, 1.0)
    known = DriftMonitor(lambda operation, units: 1.0, limits=DriftLimits(least=1))
    known.observe("a2a", 0.0, 1.0)
    assert monitor.medians() == known.medians() == {}


def test_a_topology_has_a_key_of_its_own():
    one = Topology(4, ((0, 1), (2, 3)), ("cpu",) * 4, "gloo", "16x32x2 torch.float32")
    assert one.key == Topology(**vars(one)).key
    for changed in (
        {"world": 8},
        {"nodes": ((0, 2), (1, 3))},
        {"devices": ("cpu", "cpu", "cpu", "H200")},
        {"backend": "nccl"},
        {"shape": "16x64x2 torch.float32"},
    ):
        assert Topology(**vars(one) | changed).key != one.key
