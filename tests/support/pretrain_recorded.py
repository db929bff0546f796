"""examples/pretrain_moe.py, with a record of who trained on which samples, in which step.

Appends to $SAMPLES_FILE one line per microbatch that counts: {"generation", "step", "node", "pid",
"samples"}. It is there before the microbatch runs, so a killed process leaves it as well.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_moe
import torch
from megatron.core import mpu
from megatron.core.datasets.gpt_dataset import MockGPTDataset

import megatron_resilient
from megatron_resilient.mcore import empty_microbatches
from megatron_resilient.mcore.recovery import session

_plain_item = MockGPTDataset.__getitem__
_plain_forward_step = pretrain_moe.forward_step


def _item_with_number(dataset, number):
    return _plain_item(dataset, number) | {"sample": torch.tensor(-1 if number is None else number)}


class _Recorded:
    def __init__(self, samples):
        self._samples = samples

    def __next__(self):
        batch = next(self._samples)
        if mpu.is_pipeline_first_stage() and not empty_microbatches._is_empty:
            _write(batch["sample"].tolist())
        return batch


def _write(samples):
    current = session.current()
    line = {
        "generation": current.world.generation,
        "step": current.live.progress.step + 1,
        "node": current.member.node,
        "pid": os.getpid(),
        "samples": samples,
    }
    # One write each: the lines of several processes do not mix.
    with open(os.environ["SAMPLES_FILE"], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def _forward_step(data_iterator, model, *args, **kwargs):
    if model.training and data_iterator is not None:
        data_iterator = _Recorded(data_iterator)
    return _plain_forward_step(data_iterator, model, *args, **kwargs)


if __name__ == "__main__":
    MockGPTDataset.__getitem__ = _item_with_number
    pretrain_moe.forward_step = _forward_step
    megatron_resilient.run(pretrain_moe.main)
