"""The testbed's network as commands, and how it refuses a machine that cannot have one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.testbed_links import Layout, address, commands, hosts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (2, 2), (4, 1), (3, 2)])
def test_every_pair_has_one_route_by_the_right_link(nodes, ranks_per_node):
    layout = Layout(nodes, ranks_per_node)
    routes = {}
    for command in commands(layout):
        if command[3:5] == ["route", "add"]:
            pair = command[2], command[5]
            assert pair not in routes
            routes[pair] = command[7]
    assert routes == {
        (f"rank{rank}", f"{address(peer)}/32"): (
            "intra" if rank // ranks_per_node == peer // ranks_per_node else "inter"
        )
        for rank in range(layout.world)
        for peer in range(layout.world)
        if rank != peer
    }


def test_both_ends_of_every_link_are_shaped():
    shaped = [
        (command[:3] if command[1] == "-n" else command[:1], command[command.index("dev") + 1])
        for command in commands(Layout(2, 2))
        if command[0] == "tc"
    ]
    assert len(shaped) == 16
    assert (["tc", "-n", "rank3"], "intra") in shaped
    assert (["tc"], "inter2") in shaped


def test_hosts_name_every_rank():
    lines = [line.split() for line in hosts(Layout(2, 1)).splitlines()]
    assert {tuple(line) for line in lines} >= {
        (address(0), "rank0"),
        (address(1), "rank1"),
        (f"::ffff:{address(1)}", "rank1"),
    }


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("os.geteuid() or os.setuid(65534)", "need root: run it with sudo"),
        ("os.environ['PATH'] = '/nowhere'", "ip and tc not found: install iproute2"),
        ("sys.platform = 'darwin'", "a thing of Linux"),
    ],
)
def test_a_machine_that_cannot_have_one_is_told_so_in_one_line(before, message):
    if "geteuid" not in before:
        before += "; os.geteuid = lambda: 0"
    code = (
        f"import os, sys; import testbed; {before}; sys.exit(testbed.main(['run', 'testbed.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
