"""Saving and resuming through pretrain(): the resumed run is the one that was not interrupted."""

import pytest

from tests.support.layouts import DISTOPT, EP2, EP4, PP2, RESHARDABLE, TP2
from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SAVED, END = 3, 6
MODEL = TINY | {"lr": 3e-3, "save_interval": SAVED}
# The checkpoint's train-iters are fewer.
LONGER = {"override_opt_param_scheduler": True}
LAYOUTS = {
    "EP2": EP2,
    "EP2 distopt": EP2 | DISTOPT,
    "EP2 reshardable": EP2 | RESHARDABLE,
    "TP2 PP2 EP2": TP2 | PP2 | EP2,
    "TP2 PP2 EP2 distopt": TP2 | PP2 | EP2 | DISTOPT,
    "EP4 bf16 distopt": EP4 | DISTOPT | {"bf16": True},
    # EP2 on four ranks: each stream is drawn from by two data-parallel ranks.
    "EP2 dropout": EP2 | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "EP4 TP2 dropout": EP4
    | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
}


SAVES = [(name, False) for name in LAYOUTS] + [
    (name, True) for name in ("EP2", "EP2 distopt", "EP2 reshardable", "TP2 PP2 EP2 distopt")
]


@pytest.mark.parametrize(
    ("name", "is_async"), SAVES, ids=[name + " async" * is_async for name, is_async in SAVES]
)
def test_resume_is_bitwise_exact(pools, tmp_path, name, is_async):
    layout = MODEL | LAYOUTS[name] | {"train_iters": END}
    whole = pools.plugin.run(**layout, save=tmp_path, async_save=is_async, digest=True).ok()
    assert len(whole.numbers) == END
    resumed = pools.plugin.run(**layout, load=tmp_path, ckpt_step=SAVED, digest=True).ok()
    assert resumed.numbers == whole.numbers[SAVED:]
    parameters = [[answer["parameters"] for answer in run.answers] for run in (whole, resumed)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("optimizer", [{}, RESHARDABLE], ids=["plain", "reshardable"])
def test_resume_with_other_expert_parallel_sizes(pools, tmp_path, optimizer):
    """EP 4 -> 2 -> 1 -> 2 -> 4, two steps each: as if the first had gone on."""
    steps, sizes = 2, (4, 2, 1, 2, 4)
    model = MODEL | optimizer | {"save_interval": steps} | LONGER
    whole = pools.plugin.run(**(model | EP4), train_iters=steps * len(sizes)).ok()
    numbers = []
    for count, size in enumerate(sizes, start=1):
        part = pools.plugin.run(
            **(model | {"expert_model_parallel_size": size}),
            train_iters=steps * count,
            save=tmp_path,
            load=tmp_path,
        ).ok()
        assert len(part.numbers) == steps
        numbers += part.numbers
    for step, (part, expected) in enumerate(zip(numbers, whole.numbers, strict=True), start=1):
        assert part == pytest.approx(expected, rel=1e-6), f"step {step}"


def test_every_rank_gets_its_expert_stream_back(pools, tmp_path):
    inspect = "tests.support.rng_streams:expert_stream"
    model = MODEL | EP4 | LONGER | {"train_iters": SAVED}
    saved = pools.plugin.run(**model, save=tmp_path, inspect=inspect).ok()
    assert len(set(saved.inspected)) == 4
    # Another seed: what is the same afterwards came from the checkpoint.
    model |= {"train_iters": SAVED + 1, "seed": 4321}
    other = pools.plugin.run(**model, inspect=inspect).ok()
    assert not set(other.inspected) & set(saved.inspected)
    loaded = pools.plugin.run(**model, load=tmp_path, inspect=inspect).ok()
    assert loaded.inspected == saved.inspected
