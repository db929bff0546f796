import argparse

import pytest

from megatron_resilient.elastic.limits import Limits
from megatron_resilient.errors import ConfigError


def test_flags_and_back():
    parser = argparse.ArgumentParser()
    Limits.add_flags(parser)
    assert Limits.from_args(parser.parse_args([])) == Limits()
    limits = Limits(heartbeat_interval=0.25, heartbeat_timeout=1.5, hang_timeout=0)
    assert Limits.from_args(parser.parse_args(limits.flags())) == limits


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heartbeat_interval": 0}, "--heartbeat-interval 0: give more than 0 seconds"),
        ({"rejoin_timeout": float("nan")}, "--rejoin-timeout nan"),
        ({"join_window": -1}, "--join-window -1: give 0 or more seconds"),
        ({"heartbeat_interval": 3}, "at least three times --heartbeat-interval 3"),
        ({"fence_timeout": 5}, "--fence-timeout 5: must not be less than --heartbeat-timeout 6"),
        ({"hang_timeout": 20}, "--hang-timeout 20: must not be less than --fence-timeout 30"),
        ({"coordinator_timeout": 1}, "--coordinator-timeout 1: must not be less"),
        ({"rejoin_timeout": 1}, "--rejoin-timeout 1: must not be less"),
    ],
)
def test_what_cannot_work_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Limits(**values)


def test_zero_switches_off():
    assert Limits(hang_timeout=0, join_window=0).hang_timeout == 0
