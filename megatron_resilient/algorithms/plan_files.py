"""The files a plan is made from: measured loads, and the description of the cluster."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_resilient.algorithms.topology import NO_RACK, Topology
from megatron_resilient.errors import PlanError
from megatron_resilient.input_files import MOST, is_number, read_json
from megatron_resilient.telemetry import read_events


def read_loads(path: str | Path) -> list[list[int | float]]:
    """Reads `{"layers": [[tokens of expert 0, tokens of expert 1, ...], ...]}`.

    Or what a run counted, if `path` is its folder: tokens of the later half of its steps, because
    routers spread tokens otherwise in their first steps. Layers without experts are left out.

    Raises:
        PlanError: The file cannot be read as that; the message says where.
        TelemetryError: The events of a run are damaged.
    """
    if Path(path).is_dir():
        return _loads_of_run(path)
    document = read_json(path, PlanError)
    layers = document.get("layers") if isinstance(document, Mapping) else None
    if not _is_list(layers) or not layers:
        raise PlanError(f'{path}: expected {{"layers": [[tokens of expert 0, ...], ...]}}')
    for layer, loads in enumerate(layers):
        if not _is_list(loads) or not loads:
            raise PlanError(f"{path}: layers[{layer}] must be a list with a number per expert")
        for expert, load in enumerate(loads):
            if not is_number(load) or not load >= 0:
                raise PlanError(
                    f"{path}: layers[{layer}][{expert}] is {json.dumps(load)}: "
                    f"tokens must be a number from 0 to {MOST:g}"
                )
        if sum(loads) > MOST:
            raise PlanError(
                f"{path}: layers[{layer}] has {sum(loads):g} tokens: more than {MOST:g}"
            )
    return [list(loads) for loads in layers]


def _loads_of_run(path: str | Path) -> list[list[int | float]]:
    # A step that was rolled back and done again counts once, as it was done last.
    counted = {
        (event["layer"], event["step"]): event["tokens"]
        for event in read_events(path)
        if event["event"] == "expert_load" and event["step"] is not None
    }
    if not counted:
        raise PlanError(
            f"{path}: the run has counted no loads yet (--resilient-expert-load-interval)"
        )
    steps = [step for _, step in counted]
    middle = (min(steps) + max(steps)) / 2
    later: dict[int, list[list[int | float]]] = {}
    for (layer, step), tokens in counted.items():
        if step >= middle:
            later.setdefault(layer, []).append(tokens)
    for layer, rows in later.items():
        if len({len(row) for row in rows}) > 1:
            raise PlanError(
                f"{path}: layer {layer} has not always had as many experts: the folder has several "
                "models; give that of one"
            )
    return [
        [sum(column) for column in zip(*rows, strict=True)] for _, rows in sorted(later.items())
    ]


def read_topology(path: str | Path) -> Topology:
    """Reads nodes and racks with their failure probabilities.

    The form is `{"nodes": [{"id": .., "rack": .., "failure_probability": ..}, ...], "racks":
    [{"id": .., "failure_probability": ..}, ...]}`. A node may be in no rack.

    Returns:
        The topology; nodes are numbered in the order of the file.

    Raises:
        PlanError: The file cannot be read as that; the message says where.
    """
    document = read_json(path, PlanError)
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if not _is_list(nodes) or not nodes:
        raise PlanError(f'{path}: expected {{"nodes": [{{"id": .., ..}}, ...], "racks": [...]}}')
    racks = document.get("racks", [])
    if not _is_list(racks):
        raise PlanError(f"{path}: racks must be a list")
    rack_ids = _ids(racks, "racks", path)
    _ids(nodes, "nodes", path)
    rack_of = []
    for index, node in enumerate(nodes):
        rack = node.get("rack")
        if rack is not None and rack not in rack_ids:
            raise PlanError(f"{path}: nodes[{index}].rack is {json.dumps(rack)}: no such rack")
        rack_of.append(NO_RACK if rack is None else rack_ids.index(rack))
    return Topology(
        _probabilities(nodes, "nodes", path), tuple(rack_of), _probabilities(racks, "racks", path)
    )


def _ids(entries: Sequence[Any], kind: str, path: str | Path) -> list[Any]:
    ids: list[Any] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "id" not in entry:
            raise PlanError(f"{path}: {kind}[{index}] must be an object with an id")
        if entry["id"] in ids:
            raise PlanError(f"{path}: {kind}[{index}].id is {json.dumps(entry['id'])} once more")
        ids.append(entry["id"])
    return ids


def _probabilities(
    entries: Sequence[Mapping[str, Any]], kind: str, path: str | Path
) -> tuple[float, ...]:
    found = []
    for index, entry in enumerate(entries):
        value: Any = entry.get("failure_probability")
        if not is_number(value) or not 0 <= value <= 1:
            raise PlanError(
                f"{path}: {kind}[{index}].failure_probability is {json.dumps(value)}: "
                "it must be a number in [0, 1]"
            )
        found.append(float(value))
    return tuple(found)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
