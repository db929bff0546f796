"""What tests of uneven worlds call on the ranks of a pool."""


def wrapped(model, optimizer):
    """Returns the methods of routers and dispatchers that are not their classes' own."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, MoELayer)]
    parts = [part for layer in layers for part in (layer.router, layer.token_dispatcher)]
    return sorted(
        {name for part in parts for name in ("forward", "preprocess") if name in vars(part)}
    )


def expert_biases(model, optimizer):
    """Returns the expert biases of all routers of this rank."""
    return [
        buffer.tolist()
        for chunk in model
        for name, buffer in chunk.named_buffers()
        if name.endswith("expert_bias")
    ]
