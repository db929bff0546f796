"""Flags of an elastic run: what follows the world, and what no elastic run can have."""

import argparse
import hashlib
import json
import os

from megatron_resilient.errors import ConfigError

COORDINATOR = "MEGATRON_RESILIENT_COORDINATOR"  # host:port, set by the agent of the node
# May differ between nodes, or between generations.
_LOCAL = ("local_rank", "rank", "resilient_fault", "inprocess_active_world_size")

# (attribute, is it in the way?, why)
_REFUSED = (
    ("use_precision_aware_optimizer", bool, "its fp32 copies are out of reach"),
    ("optimizer_cpu_offload", bool, "its copies are out of reach"),
    ("optimizer_cuda_graph", bool, "a captured step cannot agree with the others"),
    ("use_megatron_fsdp", bool, "its shards cannot be refilled"),
    ("use_torch_fsdp2", bool, "its shards cannot be refilled"),
    ("num_distributed_optimizer_instances", lambda v: (v or 1) > 1, "shards are kept in one place"),
    (
        "optimizer",
        lambda v: v not in ("adam", "sgd"),
        "only Adam's and SGD's state can be refilled",
    ),
    ("moe_use_upcycling", bool, "upcycle first, then start from its checkpoint"),
)


def is_elastic() -> bool:
    """Tells whether this process is a worker of an elastic run."""
    return bool(os.environ.get(COORDINATOR))


def join_world(args: argparse.Namespace) -> None:
    """Waits until this process has a rank, which the rest of the command line needs to know.

    Afterwards the environment says who this is: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """
    from megatron_resilient.mcore.recovery import session

    current = session.current()
    if current is None:
        raise ConfigError(
            "started by `megatron-resilient run`, but the script does not call "
            "megatron_resilient.run(main)"
        )
    own = {name: repr(value) for name, value in sorted(vars(args).items()) if name not in _LOCAL}
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16]
    grid = [
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    ]
    settings = {"min_nodes": args.resilient_min_nodes, "flags_digest": digest}
    current.join(grid, settings, args.resilient_fault)


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
    for name, in_the_way, why in _REFUSED:
        value = getattr(args, name, None)
        if in_the_way(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value} in an elastic run: {why}")
    if not args.num_experts:
        return
    if getattr(args, "mtp_num_layers", None):
        raise ConfigError(
            f"--mtp-num-layers {args.mtp_num_layers} in an elastic run: experts of multi-token "
            "prediction have no replicas and cannot be refilled"
        )
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
