"""The plugin with all its features off is stock Megatron, bit for bit."""

import pytest

from tests.support.pretrain_pool import TINY

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 50
LAYOUTS = {
    "EP2": {"expert_model_parallel_size": 2},
    "EP4": {"expert_model_parallel_size": 4},
    "TP2 EP2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
    "PP2 EP2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_steps_are_those_of_stock(pools, name):
    run = TINY | LAYOUTS[name] | {"train_iters": STEPS, "digest": True}
    plugin, stock = pools.plugin.run(**run).ok(), pools.stock.run(**run).ok()
    assert len(stock.numbers) == STEPS
    assert stock.losses[-1] < stock.losses[0] - 1
    assert plugin.numbers == stock.numbers
    parameters = [[answer["parameters"] for answer in each.answers] for each in (plugin, stock)]
    assert parameters[0] == parameters[1]
