"""Which gradients are final in which layer, by where parameters stand in a model."""

from torch import nn

from megatron_resilient.mcore.overlap.final_gradients import ABOVE, BELOW, lowest_layers


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.own = nn.Linear(2, 2, bias=False)


class Model(nn.Module):
    def __init__(self, numbers=(), head=True):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(number) for number in numbers)
        self.decoder.final_layernorm = nn.LayerNorm(2) if head else None
        self.output_layer = nn.Linear(2, 3, bias=False) if head else None


def named(model):
    lowest = lowest_layers([model])
    return {
        name: lowest[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def test_places_in_a_model():
    assert named(Model((5, 6))) == {
        "embedding.weight": BELOW,
        "decoder.layers.0.own.weight": 5,
        "decoder.layers.1.own.weight": 6,
        "decoder.final_layernorm.weight": ABOVE,
        "decoder.final_layernorm.bias": ABOVE,
        "output_layer.weight": ABOVE,
    }


def test_what_is_shared_counts_as_its_lowest_use():
    model = Model((1, 2, 3))
    model.output_layer.weight = model.embedding.weight
    model.decoder.layers[2].own.weight = model.decoder.layers[1].own.weight
    model.decoder.final_layernorm.bias = model.decoder.layers[2].own.weight
    found = named(model)
    assert found["output_layer.weight"] == BELOW
    assert found["decoder.layers.2.own.weight"] == 2
    assert found["decoder.final_layernorm.bias"] == 2


def test_several_chunks_and_what_is_unknown():
    low, high = Model((1, 2), head=False), Model((5,))
    high.extra = nn.Linear(1, 1)
    lowest = lowest_layers([low, high])
    assert lowest[low.decoder.layers[1].own.weight] == 2
    assert lowest[high.decoder.layers[0].own.weight] == 5
    assert lowest[high.extra.weight] == BELOW
