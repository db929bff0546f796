"""Flags of an elastic run: what follows the world, and what no elastic run can have."""

import argparse
import os

from megatron_resilient.errors import ConfigError

COORDINATOR = "MEGATRON_RESILIENT_COORDINATOR"  # host:port, set by the agent of the node


def is_elastic() -> bool:
    """Tells whether this process is a worker of an elastic run."""
    return bool(os.environ.get(COORDINATOR))


def adapt(args: argparse.Namespace) -> None:
    """Makes the layout of experts that of this world: one expert-parallel domain over all ranks.

    Slots are as many as were asked for, or as many as the experts need here.

    Raises:
        ConfigError: a flag with which the batch of a step would depend on the world.
    """
    if args.global_batch_size is None:
        raise ConfigError(
            "--global-batch-size is missing: without it an elastic run's batch would change with "
            "its world"
        )
    if args.decrease_batch_size_if_needed:
        raise ConfigError(
            "--decrease-batch-size-if-needed: an elastic run keeps its batch in every world; drop "
            "the flag"
        )
    if not args.num_experts:
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    asked = args.expert_model_parallel_size, args.resilient_slots_per_rank
    ranks = max(1, world // (expert_tp * args.pipeline_model_parallel_size))
    slots = min(args.num_experts, max(asked[1], -(-args.num_experts // ranks)))
    args.expert_model_parallel_size, args.resilient_slots_per_rank = ranks, slots
    if (ranks, slots) != asked and os.environ.get("RANK", "0") == "0":
        print(
            f"elastic run of {world} ranks: --expert-model-parallel-size {ranks} (asked for: "
            f"{asked[0]}), --resilient-slots-per-rank {slots} (asked for: {asked[1]})",
            flush=True,
        )
