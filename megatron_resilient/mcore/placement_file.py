"""Which slot held which expert when a checkpoint was saved, beside the checkpoint.

Not needed to go on: a checkpoint holds logical experts and any placement can load it. With it a
resumed run adds in the same order as the run that was saved, and its losses are equal in every bit.
"""

import json
import os
from glob import glob

from megatron_resilient.comm.transfer import Holding
from megatron_resilient.errors import CheckpointError
from megatron_resilient.mcore.moe_layer import ReplicatedMoELayer

_NAME = "resilient_placement"


def write(folder: str, layers: list[ReplicatedMoELayer]) -> None:
    """Writes the holdings of the layers of one pipeline stage."""
    path = os.path.join(folder, f"{_NAME}.from_layer_{layers[0].layer_number}.json")
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump({str(layer.layer_number): layer.holding for layer in layers}, file)
    os.replace(f"{path}.tmp", path)


def read(folder: str, layers: list[ReplicatedMoELayer]) -> list[Holding] | None:
    """Returns the saved holdings of the layers, None where they do not fit this run or are absent.

    Raises:
        CheckpointError: a file is damaged.

    They fit if every layer has as many ranks and slots as now, and the same experts.
    """
    saved: dict[str, Holding] = {}
    for path in sorted(glob(os.path.join(folder, f"{_NAME}.*.json"))):
        try:
            with open(path, encoding="utf-8") as file:
                saved |= json.load(file)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): delete it to go on from another placement"
            ) from error
    found = [saved.get(str(layer.layer_number)) for layer in layers]
    for holding, layer in zip(found, layers, strict=True):
        if holding is None or not _fits(holding, layer):
            return None
    return found  # type: ignore[return-value]


def _fits(holding: Holding, layer: ReplicatedMoELayer) -> bool:
    now = layer.holding
    return [len(slots) for slots in holding] == [len(slots) for slots in now] and (
        {e for slots in holding for e in slots} == {e for slots in now for e in slots}
    )
