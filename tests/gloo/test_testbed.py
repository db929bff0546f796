"""The emulated testbed: who is where, which link is taken, and what is left afterwards."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import until

ROOT = Path(__file__).parents[2]
TESTBED = [sys.executable, str(ROOT / "tools" / "testbed.py")]
PROBE = str(ROOT / "tests" / "support" / "testbed_probe.py")
SIZE = 1 << 20  # bytes that the probe sends
LIMIT_SECONDS = 120

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(180)]


@functools.cache
def obstacle() -> str | None:
    """Why no namespaces can be made here: the only reason to leave these tests out."""
    done = subprocess.run([*TESTBED, "check"], capture_output=True, text=True, timeout=60)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture(autouse=True)
def _possible():
    if obstacle() is not None:
        pytest.skip(obstacle())


def run_testbed(*arguments):
    """Runs it to its end, and kills it if that does not come."""
    return subprocess.run(
        [*TESTBED, "run", *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


def answers(done):
    """Returns what each rank said, by rank; the name of the rank stands before each line."""
    assert done.returncode == 0, done.stderr
    said = {}
    for line in done.stdout.splitlines():
        node, rank, text = re.fullmatch(r"\[node(\d+) rank(\d+)\] (.*)", line).groups()
        said[int(rank)] = json.loads(text) | {"node": int(node)}
    return [said[rank] for rank in sorted(said)]


def test_routes_and_shapers():
    flags = ["--nodes", "2", "--ranks-per-node", "2", "--inter-mbit", "100", "--intra-mbit", "400"]
    first, *others = answers(run_testbed(*flags, "--", PROBE, "links"))
    assert [each["node"] for each in (first, *others)] == [0, 0, 1, 1]
    assert [each["environment"] for each in others] == [
        {"LOCAL_RANK": "1", "GROUP_RANK": "0"},
        {"LOCAL_RANK": "0", "GROUP_RANK": "1"},
        {"LOCAL_RANK": "1", "GROUP_RANK": "1"},
    ]
    for peer, link, other, mbit in (
        (1, "intra", "inter", 400),
        (2, "inter", "intra", 100),
        (3, "inter", "intra", 100),
    ):
        told = first[f"to {peer}"]
        assert SIZE <= told["sent"][link] <= 1.2 * SIZE
        assert told["sent"][other] <= 0.01 * SIZE
        # A busy machine is slower than the link, and never faster.
        assert told["seconds"] >= 0.9 * SIZE * 8 / (mbit * 1e6)
    for link, mbit in (("inter", 100), ("intra", 400)):
        shaper = first["shapers"][link]
        assert shaper["options"]["rate"] * 8 == mbit * 1_000_000
        assert shaper["overlimits"] > 0  # it held packets back


def test_torch_runs_on_it():
    told = answers(run_testbed("--nodes", "2", "--ranks-per-node", "1", PROBE, "gloo"))
    assert [each["total"] for each in told] == [[3.0], [3.0]]
    for each in told:
        assert 0.9 * SIZE <= each["sent"]["inter"] <= 2.2 * SIZE
        assert each["sent"]["intra"] <= 0.01 * SIZE


def test_the_status_is_that_of_the_rank_that_failed():
    done = run_testbed("--nodes", "2", "--ranks-per-node", "1", PROBE, "fail")
    assert done.returncode == 7
    assert "[node1 rank1] no good" in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)]
)
def test_nothing_is_left_of_one_that_is_killed(number, status):
    devices = set(os.listdir("/sys/class/net"))
    mounts = Path("/proc/self/mounts").read_text(encoding="ascii")
    driver = subprocess.Popen(
        [*TESTBED, "run", "--ranks-per-node", "1", PROBE, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(2):
            assert b"ready" in driver.stdout.readline()
        started = psutil.Process(driver.pid).children(recursive=True)
        assert len(started) >= 3  # process 1 in there and two ranks
        networks = {os.readlink(f"/proc/{each.pid}/ns/net") for each in started}
        assert len(networks) == 3
        driver.send_signal(number)
        assert driver.wait(LIMIT_SECONDS) == status
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    until(lambda: not any(each.is_running() for each in started))
    until(lambda: not networks & _networks_in_use())
    assert set(os.listdir("/sys/class/net")) == devices
    assert Path("/proc/self/mounts").read_text(encoding="ascii") == mounts


def _networks_in_use():
    found = set()
    for pid in psutil.pids():
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0", PROBE], "nodes must be at least 1"),
        (["--nodes", "60", "--ranks-per-node", "8", PROBE], "480 ranks are more than"),
        (["absent.py"], "no such script: absent.py"),
    ],
)
def test_wrong_usage_is_refused(arguments, message):
    done = run_testbed(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
