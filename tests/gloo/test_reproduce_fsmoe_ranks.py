"""What figures of FSMoE measure on real processes."""

import pytest

from tests.support import gloo_ranks
from tools.reproduce.fsmoe_gates import PAPER_MS

pytestmark = pytest.mark.multiprocess


def test_a_small_profile(tmp_path):
    options = {"nodes": (0, 0, 1, 1), "budget_seconds": 1.0, "largest_bytes": 1 << 18}
    told = gloo_ranks.run("tools.reproduce.fsmoe_ranks:profile", 4, tmp_path, **options)
    assert told[0]["lines"] == told[3]["lines"]
    assert set(told[0]["quality"]) == {"a2a", "allgather", "reducescatter", "allreduce", "gemm"}


def test_a_layer_with_every_gate(pools):
    sizes = {"hidden": 16, "ffn": 8, "experts": 4, "tokens": 12, "rounds": 2}
    (told,) = pools.plugin.call(
        "tools.reproduce.fsmoe_gate_layers:times", world=1, gates=list(PAPER_MS), **sizes
    )
    assert set(told) == set(PAPER_MS)
    for parts in told.values():
        assert all(len(own) == 2 and min(own) > 0 for own in parts.values())
