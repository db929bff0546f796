"""Expert loads over training: a grid of layers, experts and intervals of steps."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_resilient.errors import TelemetryError
from megatron_resilient.telemetry import Event

Floats = NDArray[np.float64]
MAX_COLUMNS = 240


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of L layers in C intervals of equal width; nan where nothing was recorded.

    Attributes:
        layers: [L], numbers of the layers, ascending.
        first_step: Where the first interval begins.
        last_step: Where the last one ends.
        relative: Per layer [E, C]: load of an expert / mean load of the layer's experts.
        imbalance: [L, C]: greatest / mean load of an expert, as the router sent them.
        rank_imbalance: [L, C]: the same of the ranks, as they computed; None if not recorded.
    """

    layers: list[int]
    first_step: int
    last_step: int
    relative: list[Floats]
    imbalance: Floats
    rank_imbalance: Floats | None

    @classmethod
    def of(cls, events: Iterable[Event]) -> "ExpertLoads | None":
        """Returns the loads; None if there are none.

        An event spreads its tokens over the steps that it covers. One that was written again after
        a roll-back replaces the first.

        Raises:
            TelemetryError: A layer changes its number of experts: the directory holds two models.
        """
        latest = {
            (event["layer"], event["step"]): event
            for event in events
            if event["event"] == "expert_load" and event["step"] is not None
        }
        if not latest:
            return None
        layers = sorted({layer for layer, _ in latest})
        starts = {key: key[1] - max(1, event["steps"]) for key, event in latest.items()}
        first = min(starts.values())
        last = max(step for _, step in latest)
        columns = min(MAX_COLUMNS, len({step for _, step in latest}))
        width = (last - first) / columns
        tokens: dict[int, Floats] = {}
        ranks: dict[int, Floats] = {}  # per layer: row 0 the sum, row 1 the count
        for (layer, step), event in latest.items():
            counts = np.array(event["tokens"], dtype=float)
            grid = tokens.setdefault(layer, np.zeros((counts.size, columns)))
            if grid.shape[0] != counts.size:
                raise TelemetryError(
                    f"expert_load: layer {layer} has {grid.shape[0]} experts and, at step {step}, "
                    f"{counts.size}: two models in one directory; give each run its own"
                )
            begin = min(columns - 1, int((starts[layer, step] - first) / width + 0.5))
            end = max(begin + 1, int((step - first) / width + 0.5))
            grid[:, begin:end] += (counts / (step - starts[layer, step]))[:, None]
            if "rank_tokens" in event and sum(event["rank_tokens"]):
                of_ranks = ranks.setdefault(layer, np.zeros((2, columns)))
                of_ranks[0, begin:end] += max(event["rank_tokens"]) / np.mean(event["rank_tokens"])
                of_ranks[1, begin:end] += 1
        relative = [_divide(tokens[layer], tokens[layer].mean(axis=0)) for layer in layers]
        nothing = np.zeros((2, columns))
        return cls(
            layers=layers,
            first_step=first,
            last_step=last,
            relative=relative,
            imbalance=np.stack([grid.max(axis=0) for grid in relative]),
            rank_imbalance=np.stack([_divide(*ranks.get(layer, nothing)) for layer in layers])
            if ranks
            else None,
        )

    def typical_imbalance(self) -> Floats:
        """Returns the mean imbalance of each layer over training, [L]."""
        return mean_of_known(self.imbalance, axis=1)


def mean_of_known(values: Floats, axis: int) -> Floats:
    """Returns the mean along `axis` without the nan; nan where there is nothing else."""
    known = np.isfinite(values)
    return _divide(np.where(known, values, 0.0).sum(axis=axis), known.sum(axis=axis).astype(float))


def _divide(a: Floats, b: Floats) -> Floats:
    quotient: Floats = np.divide(a, b, out=np.full(np.broadcast(a, b).shape, np.nan), where=b > 0)
    return quotient
