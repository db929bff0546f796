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


def weigh(batch, ranks, form, per_token=False):
    """Runs a step of losses 1, 2, 3, ... on all its ranks, one after the other.

    Returns:
        [by rank, by microbatch, [loss, tokens or None, what is logged]].
    """
    import torch

    from megatron_resilient.algorithms.microbatches import Microbatches
    from megatron_resilient.mcore.empty_microbatches import WeighedForwardStep, end

    def loss_func(loss):
        logged = {"one": loss.detach(), "two": torch.stack([loss.detach(), torch.tensor(4.0)])}
        return (loss, torch.tensor(4), logged) if form == 3 else (loss, logged)

    layout = Microbatches(batch, 1, ranks)
    table = []
    for rank in range(ranks):
        numbers = iter(range(rank, layout.per_rank * ranks, ranks))
        step = WeighedForwardStep(
            lambda data, model: (torch.tensor(1.0 + next(data)), loss_func),
            layout,
            rank,
            per_token,
        )
        model, rows = torch.nn.Linear(1, 1), []
        for _ in range(layout.per_rank):
            output, weighed = step(numbers, model)
            loss, *tokens, logged = weighed(output)
            logged = {name: value.tolist() for name, value in logged.items()}
            rows.append([float(loss), int(tokens[0]) if tokens else None, logged])
        table.append(rows)
    end()
    return table
