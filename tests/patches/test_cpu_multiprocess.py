"""The CPU group where several processes, or Megatron itself, are needed."""

import pytest
import torch

from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROWS = (1, 3, 2)


def call(pools, name):
    return pools.plugin.call(f"tests.support.collectives:{name}", world=3)


def test_uneven_all_gather(pools):
    for answer in call(pools, "all_gather"):
        assert "invalid tensor size" in answer["stock"]
        assert answer["uneven"] == [[[float(rank)] * 2] * rows for rank, rows in enumerate(ROWS)]
        assert answer["even"] == [[0.0], [1.0], [2.0]]
    first, _, last = call(pools, "all_gather")
    assert first["among two"] == last["among two"] == [[10.0], [12.0, 12.0]]


def test_uneven_reduce_scatter_needs_no_patch(pools):
    for rank, answer in enumerate(call(pools, "reduce_scatter")):
        for scale in (1, 10_000):
            assert answer[f"SUM {scale}"] == [30.0 + 3 * rank]
            assert answer[f"MAX {scale}"] == [20.0 + rank]
            assert answer[f"AVG {scale}"] == [10.0 + rank]
            assert answer[f"inputs {scale}"] == [[10.0 * rank + part] for part in range(3)]


def test_averages_need_no_patch(pools):
    for rank, answer in enumerate(call(pools, "averages")):
        assert answer["mean"] == [1.0, 3.0]
        assert answer["async mean"] == [3.0]
        assert answer["scattered mean"] == [1.0 + rank]
        assert answer["input"] == [rank, rank + 1.0, rank + 2.0]


def test_split_sizes_that_are_no_lists(pools):
    for rank, answer in enumerate(call(pools, "all_to_all_single")):
        assert answer["stock"]
        expected = [10.0 * sender + rank for sender in range(3) for _ in range(rank + 1)]
        assert answer["received"] == [expected] * 4
        assert answer["equal"] == [0.0, 1.0, 2.0]


def test_norms_are_marked_for_sequence_parallelism(pools):
    (found,) = pools.plugin.call("tests.support.megatron_parts:norms", world=1)
    for name, parameters in (("RMSNorm", 1), ("LayerNorm", 2)):
        plain, parallel = found[f"{name} False"], found[f"{name} True"]
        assert plain == {
            "marks": [False] * parameters,
            "class": name,
            "mean of squares": 1.0,
            "stock": "builds",
            "config": False,
        }
        changed = {"marks": [True] * parameters, "stock": "refuses", "config": True}
        assert parallel == plain | changed


def test_forked_streams_are_silent_and_their_own(pools):
    (found,) = pools.plugin.call("tests.support.megatron_parts:rng_fork", world=1)

    def stream(seed):
        return torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()

    assert found["inside"] == stream(7)
    assert found["outside"] == stream(1)[:2]
    assert found["ours"] == []
    warning, last = found["stock"]
    assert "CPU RNG state changed within GPU RNG context" in warning
    assert last == "still heard"


def test_ranks_that_have_trained_before_train_with_new_ones(pools):
    """A start time left behind costs one collective more than new ranks call: all would hang."""
    pools.plugin.run(2, **TINY, train_iters=1).ok()
    assert pools.plugin.call("tests.support.megatron_parts:startup_timestamps") == [None] * 4
    pools.plugin.run(4, **TINY, train_iters=1).ok()


def test_data_loader_leaves_dropout_alone(pools, tmp_path):
    """Resuming with dropout needs the loader's own generator: without it other units drop out."""
    without = {"cpu.data-loader-generator"}
    model = TINY | {"train_iters": 2, "save_interval": 1, "hidden_dropout": 0.1}
    stock = pools.plugin.run(2, **model, save=tmp_path / "stock", without=without).ok()
    resume = {"load": tmp_path / "stock", "ckpt_step": 1}
    assert pools.plugin.run(2, **model, **resume, without=without).ok().numbers != stock.numbers[1:]
    ours = pools.plugin.run(2, **model, save=tmp_path / "ours").ok()
    resume = {"load": tmp_path / "ours", "ckpt_step": 1}
    assert pools.plugin.run(2, **model, **resume).ok().numbers == ours.numbers[1:]
