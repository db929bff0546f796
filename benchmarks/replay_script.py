"""examples/pretrain_moe.py on nodes that compute side by side, though they share this machine.

Each microbatch also sleeps, for what a node's own accelerator would be busy with it: so a step
takes as long as the node with most microbatches, and not what all take together from two cores.
REPLAY_MICROBATCH_SECONDS says how long.
"""

import os
import sys
import time
from functools import wraps
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import pretrain_moe

import megatron_resilient

SECONDS = float(os.environ["REPLAY_MICROBATCH_SECONDS"])
compute = pretrain_moe.forward_step


@wraps(compute)
def forward_step(*args, **kwargs):
    """Runs the model on one microbatch, and waits."""
    time.sleep(SECONDS)
    return compute(*args, **kwargs)


if __name__ == "__main__":
    pretrain_moe.forward_step = forward_step
    megatron_resilient.run(pretrain_moe.main)
