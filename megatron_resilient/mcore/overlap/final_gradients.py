"""When the gradient of each parameter is final, from where the parameter is used in the model.

The backward pass leaves a layer when autograd has run every node of it: nodes that were made later
in the forward pass run first, and a weight's gradient is added up before any other node that is
ready. So while it is in layer L, the gradients of all that is used above L only are final. This is
a matter of the model, not of time, hence the same on all ranks.

Sums over other groups than the data-parallel one do not count: Megatron makes those of layer norms
over sequence-parallel ranks, and those of embeddings over pipeline stages, after the data-parallel
sum, and goes on doing so.
"""

import re
import sys
from collections.abc import Iterable

from torch import nn

# Used above all layers only; used somewhere else, and so not final before the end.
ABOVE, BELOW = sys.maxsize, 0

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_HEAD = re.compile(r"(decoder\.final_layernorm|output_layer)\.")


def lowest_layers(model: Iterable[nn.Module]) -> dict[nn.Parameter, int]:
    """Returns the number of the lowest layer that uses each parameter; layers count from 1.

    Args:
        model: model chunks of this rank, wrapped or not.

    Returns:
        By parameter; `ABOVE` for the final norm and an output layer with weights of its own,
        `BELOW` for embeddings, also where the output layer shares them, and for what is unknown.
        A parameter that stands in several places counts as the lowest of them.
    """
    lowest: dict[nn.Parameter, int] = {}
    for chunk in model:
        inner = chunk
        while isinstance(getattr(inner, "module", None), nn.Module):  # Megatron's wrappers
            inner = inner.module
        decoder = getattr(inner, "decoder", None)
        layers = getattr(decoder, "layers", [])
        numbers = [getattr(layer, "layer_number", BELOW) for layer in layers]
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            place = _place(name, numbers)
            lowest[parameter] = min(place, lowest.get(parameter, place))
    return lowest


def _place(name: str, numbers: list[int]) -> int:
    layer = _LAYER.match(name)
    if layer is not None:
        return numbers[int(layer[1])]
    return ABOVE if _HEAD.match(name) else BELOW
