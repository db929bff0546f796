"""What a worker tells of its random number streams."""

import hashlib


def expert_stream(model, optimizer):
    """Returns a hash of this rank's expert-parallel stream."""
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        get_expert_parallel_rng_tracker_name,
    )

    states = get_cuda_rng_tracker().get_states()
    assert not [name for name in states if "/" in name], sorted(states)
    state = states[get_expert_parallel_rng_tracker_name()]
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()
