"""What a save and the events of a step cost rank 0, at a number of nodes."""

import threading
import time
from pathlib import Path

from benchmarks.scale_model import MODEL, Cluster
from benchmarks.scale_planning import held_pieces
from megatron_resilient.algorithms.write_plan import WritePlan
from megatron_resilient.checkpoint import directory as places
from megatron_resilient.checkpoint.manifest import ArrayInfo, DataFile, Manifest, Stretch
from megatron_resilient.checkpoint.manifest_json import from_json, to_json
from megatron_resilient.checkpoint.records import take_records, write_record
from megatron_resilient.telemetry import EventLog

KINDS = {"main": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
_RECORD_BYTES = 40  # of one file: its size and its digest


def manifest_of(cluster: Cluster, writes: WritePlan) -> Manifest:
    """Returns the manifest of a full save of a world, with the files of the plan."""
    held, _ = held_pieces(cluster, sharded=True)
    arrays: dict[str, ArrayInfo] = {}
    for own in held:
        for piece in own:
            known = arrays.get(piece.key)
            if known is None or known.size < piece.stop:
                arrays[piece.key] = ArrayInfo((piece.stop,), KINDS)
    folder = places.save_folder(120, "0123456789ab")
    files = []
    for rank, units in enumerate(writes.units):
        for number, unit in enumerate(units):
            if unit.name.startswith("expert/"):
                layer, expert, part = map(int, unit.name.split("/")[1:])
                path = places.expert_file(folder, layer, expert, part, rank)
            else:
                path = places.dense_file(folder, number, rank)
            stretches = tuple(
                Stretch(piece.key, kind, piece.start, piece.stop)
                for piece in unit.pieces
                for kind in KINDS
            )
            files.append(DataFile(path, 120, 1000, f"{rank:064x}", stretches))
    return Manifest(120, "run", 1.0, True, {"layers": 61}, {}, arrays, tuple(files))


def manifest_cost(cluster: Cluster, writes: WritePlan, folder: Path) -> dict[str, float]:
    """Returns files, bytes, and seconds to write and to read the manifest of a full save."""
    manifest = manifest_of(cluster, writes)
    began = time.process_time()
    text = to_json(manifest)
    made = time.process_time()
    path = folder / "manifest.json"
    path.write_bytes(text)
    places.fsync_file(path)
    read = time.process_time()
    from_json(path.read_bytes(), "manifest")
    return {
        "files": len(manifest.files),
        "bytes": len(text),
        "write": made - began,
        "read": time.process_time() - read,
    }


def records_cost(ranks: int, folder: Path) -> tuple[float, float]:
    """Returns seconds of one rank to tell what it wrote, and of rank 0 to take all of it.

    All records are there already, so that only the work is measured and no waiting.
    """
    folder.mkdir()
    record = bytes(_RECORD_BYTES * max(1, MODEL.moe_layers * MODEL.experts // ranks + 1))
    began = time.perf_counter()
    for rank in range(ranks):
        write_record(folder, rank, record)
    written = time.perf_counter()
    assert take_records(folder, ranks, threading.Event()) is not None
    return (written - began) / ranks, time.perf_counter() - written


def events_cost(ranks: int, folder: Path) -> dict[str, float]:
    """Returns bytes and seconds of the events of ten steps: ten `step`, and the layers' loads.

    Args:
        ranks: Of an expert-parallel domain.
        folder: A run's.
    """
    loads = [4096 * 8 * 500 // 256 + number for number in range(MODEL.experts)]
    with EventLog(folder, rank=0, generation=3, node="node12") as log:
        began = time.perf_counter()
        for step in range(1, 11):
            log.emit(
                "step",
                step,
                loss={"lm loss": 2.3456789},
                seconds=12.345,
                tokens=62_914_560,
                grad_norm=0.123456,
                learning_rate=2.2e-4,
                skipped=False,
            )
        for layer in range(1, MODEL.moe_layers + 1):
            log.emit(
                "expert_load", 10, layer=layer, tokens=loads, steps=10, rank_tokens=[327680] * ranks
            )
        seconds = time.perf_counter() - began
        size = log.path.stat().st_size
    return {"events": 10 + MODEL.moe_layers, "bytes": size, "seconds": seconds}
