"""What a worker tells of AdamW's step counts."""


def step_counts(model, optimizer):
    """Returns the different step counts in the optimizer's state, sorted."""
    inner = [single.optimizer for single in optimizer.chained_optimizers]
    return sorted({float(state["step"]) for each in inner for state in each.state.values()})
