"""Where blocks travel, without processes."""

import numpy as np
import pytest

from megatron_resilient.comm.node_groups import across, cut, read_node_map
from megatron_resilient.comm.routes import stops
from megatron_resilient.errors import ConfigError

EVEN, MIXED = [0, 0, 0, 1, 1, 1], ["b", "a", "b", "a"]


@pytest.mark.parametrize("node_map", [EVEN, MIXED, [0, 0, 1], [0, 1, 2], [0, 0]])
@pytest.mark.parametrize("algorithm", ["direct", "1d", "2d"])
def test_blocks_arrive_and_hops_stay_in_their_groups(algorithm, node_map):
    nodes = cut(node_map)
    if algorithm == "2d" and len({len(node) for node in nodes}) > 1:
        with pytest.raises(ConfigError, match="use 1d or direct"):
            stops(algorithm, nodes)
        return
    kinds, holders = stops(algorithm, nodes)
    ranks = len(node_map)
    source, target = np.indices((ranks, ranks))
    assert (holders[0] == source).all()
    assert (holders[-1] == target).all()
    groups = {"whole": [range(ranks)], "intra": nodes, "inter": across(nodes)}
    for kind, before, after in zip(kinds, holders, holders[1:], strict=False):
        for a, b in zip(before.flat, after.flat, strict=True):
            assert a == b or any(a in group and b in group for group in groups[kind])


def test_2d_uses_every_rank_between_nodes_and_1d_the_first():
    nodes = cut(EVEN)
    for algorithm, senders in (("1d", {0, 3}), ("2d", set(range(6)))):
        kinds, holders = stops(algorithm, nodes)
        hop = kinds.index("inter")
        moves = holders[hop] != holders[hop + 1]
        assert set(holders[hop][moves].tolist()) == senders


def test_an_unknown_algorithm():
    with pytest.raises(ConfigError, match="no dispatch algorithm '3d': one of direct, 1d, 2d"):
        stops("3d", cut(EVEN))


def test_the_node_map_of_the_launcher():
    assert read_node_map(4, {"MEGATRON_RESILIENT_NODE_MAP": "a, b,a,b"}) == ["a", "b", "a", "b"]
    assert read_node_map(4, {"LOCAL_WORLD_SIZE": "2"}) == ["0", "0", "1", "1"]
    with pytest.raises(ConfigError, match="names 2 ranks of 4"):
        read_node_map(4, {"MEGATRON_RESILIENT_NODE_MAP": "0,1"})
    for environ in ({}, {"LOCAL_WORLD_SIZE": "3"}):
        with pytest.raises(ConfigError, match="which rank is on which node is unknown"):
            read_node_map(4, environ)
