"""The files a schedule is made from: measured costs of a cluster, and the work of the layers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_resilient.algorithms.cost_model import OPERATIONS, FitQuality, LinearCost, Profile
from megatron_resilient.algorithms.stage_costs import LayerWork
from megatron_resilient.errors import PlanError, ProfileError
from megatron_resilient.input_files import MOST, is_number, read_json

# What a layer of the file must have, and may have.
_REQUIRED = ("a2a_bytes", "allgather_bytes", "reducescatter_bytes", "expert_flops")
_OPTIONAL = ("gradient_bytes", "dense_backward_ms")
# Times of more chunks than this are all alpha, and playing them through takes seconds.
MAX_DEGREE = 256


def describe_profile(profile: Profile) -> dict[str, dict[str, float | None]]:
    """Returns a profile as its file has it; `r2` is null where it was not measured."""
    document: dict[str, dict[str, float | None]] = {}
    for name, unit in OPERATIONS.items():
        cost, quality = profile.cost(name), profile.quality.get(name)
        document[name] = {
            "alpha_ms": cost.alpha_ms,
            f"beta_ms_per_{unit}": cost.beta,
            "r2": None if quality is None else quality.r2,
        }
        if quality is not None and quality.max_relative_error is not None:
            document[name]["max_relative_error"] = quality.max_relative_error
    return document


def read_profile(path: str | Path) -> Profile:
    """Reads `{"a2a": {"alpha_ms": .., "beta_ms_per_byte": ..}, .., "gemm": {.._per_flop}}`.

    Each may also have its `r2` and its `max_relative_error`.

    Raises:
        ProfileError: The file cannot be read as that; the message says where.
    """
    document = read_json(path, ProfileError)
    return parse_profile(document, str(path))


def parse_profile(document: Any, where: str) -> Profile:
    """Returns the profile of a JSON document; `where` stands at the head of errors.

    Raises:
        ProfileError: It is no profile; the message says where.
    """
    if not isinstance(document, Mapping):
        raise ProfileError(f"{where}: expected an object with {', '.join(OPERATIONS)}")
    costs, quality = {}, {}
    for name, unit in OPERATIONS.items():
        entry = document.get(name)
        if not isinstance(entry, Mapping):
            raise ProfileError(
                f'{where}: {name} must be {{"alpha_ms": .., "beta_ms_per_{unit}": ..}}'
            )
        alpha, beta = (
            _number(entry.get(key), f"{where}: {name}.{key}", ProfileError)
            for key in ("alpha_ms", f"beta_ms_per_{unit}")
        )
        costs[name] = LinearCost(alpha, beta)
        if entry.get("r2") is not None:
            error = entry.get("max_relative_error")
            what = f"{where}: {name}"
            r2 = _number(entry["r2"], f"{what}.r2", ProfileError, least=-MOST)
            if error is not None:
                error = _number(error, f"{what}.max_relative_error", ProfileError)
            quality[name] = FitQuality(r2, error)
    return Profile(**costs, quality=quality)


def read_layers(path: str | Path) -> tuple[int, list[LayerWork]]:
    """Reads `{"max_degree": .., "layers": [{"a2a_bytes": .., ..}, ..]}`, in forward order.

    Returns:
        The most chunks of a pass, and the layers.

    Raises:
        PlanError: The file cannot be read as that; the message says where.
    """
    document = read_json(path, PlanError)
    layers = document.get("layers") if isinstance(document, Mapping) else None
    if not isinstance(layers, list) or not layers:
        raise PlanError(
            f'{path}: expected {{"max_degree": .., "layers": [{{"a2a_bytes": .., ..}}, ..]}}'
        )
    degree = document.get("max_degree")
    if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MAX_DEGREE:
        raise PlanError(
            f"{path}: max_degree is {json.dumps(degree)}: it must be an integer from 1 to "
            f"{MAX_DEGREE}"
        )
    return degree, [_layer(own, f"{path}: layers[{at}]") for at, own in enumerate(layers)]


def _layer(entry: Any, where: str) -> LayerWork:
    if not isinstance(entry, Mapping):
        raise PlanError(f"{where} must be an object with {', '.join(_REQUIRED + _OPTIONAL)}")
    values = {
        name: _number(entry.get(name), f"{where}.{name}", PlanError)
        for name in (*_REQUIRED, *(own for own in _OPTIONAL if own in entry))
    }
    gradient = values.pop("gradient_bytes", 0)
    if gradient != int(gradient):
        raise PlanError(f"{where}.gradient_bytes is {gradient}: bytes come whole")
    return LayerWork(gradient_bytes=int(gradient), **values)


def _number(
    value: Any, what: str, error: type[ProfileError] | type[PlanError], least: float = 0.0
) -> float:
    if not is_number(value) or value < least:
        raise error(
            f"{what} is {json.dumps(value)}: it must be a number from {least:g} to {MOST:g}"
        )
    return float(value)
