"""Dispatch over nodes in several hops brings what a direct all-to-all brings, bit for bit."""

import pytest

from tests.support.gloo_ranks import run

PROBE = "tests.support.hierarchical_probe"
MAPS = [
    ([0, 0, 1, 1], ["direct", "1d", "2d"]),
    (["b", "a", "b", "a"], ["1d", "2d"]),  # a node's ranks need not be neighbours
    ([0, 0, 0, 1], ["direct", "1d"]),
]
COUNTS = [[2, 3, 1, 4], [0, 4, 0, 0], [0, 0, 0, 0]]
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of four ranks says of everything."""
    return run(
        f"{PROBE}:everything",
        4,
        tmp_path_factory.mktemp("ranks"),
        timeout_seconds=200,
        maps=MAPS,
        counts=COUNTS,
    )


@pytest.mark.parametrize("number", range(len(MAPS)))
def test_every_way_is_equal_to_the_direct_one(told, number):
    for rank in told:
        ways = rank["ways"][number]
        assert len(ways) == 10 * len(MAPS[number][1])
        wrong = {key: value for key, value in ways.items() if not all(value.values())}
        assert not wrong


def test_unlike_nodes_have_no_2d(told):
    for rank in told:
        assert rank["refused"] == (
            "dispatch by 2d wants as many ranks on every node, not [1, 3]: use 1d or direct"
        )


@pytest.mark.parametrize("number", range(len(COUNTS)))
def test_gathers_and_sums_of_uneven_rows(told, number):
    for rank in told:
        assert rank["rows"][number] == {"torch.float32": [True] * 3, "torch.bfloat16": [True] * 3}
