"""The benchmark of overlap on one device runs, here on threads; times are not looked at."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "overlap_device.py"
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_degree_is_predicted_and_measured(device):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--device", device],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    chosen = re.findall(r"chosen: (\d) chunks, [a-z]+-first: ([0-9.]+) ms", done.stdout)
    assert len(chosen) == 3
    assert all(1 <= int(degree) <= 8 and float(ms) > 0 for degree, ms in chosen)
    rows = re.findall(r"^│ (\d) +│ ([0-9.]+) +│ ([0-9.]+) +│", done.stdout, re.MULTILINE)
    assert [int(degree) for degree, _, _ in rows] == 3 * list(range(1, 9))
