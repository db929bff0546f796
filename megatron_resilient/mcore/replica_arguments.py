"""Flags of replicas against Megatron's: what cannot be combined is refused by name, not ignored."""

import argparse
import os

from megatron_resilient.config import ReplicaConfig
from megatron_resilient.errors import ConfigError

GIB = 1 << 30

# (attribute, is it in the way?, why)
_REFUSED = (
    (
        "moe_expert_capacity_factor",
        lambda v: v is not None,
        "Megatron would take the capacity per slot, not per expert, and drop other tokens",
    ),
    ("moe_pad_expert_input_to_capacity", bool, "it pads slots, not experts"),
    ("moe_use_upcycling", bool, "upcycling writes experts by position; start from its checkpoint"),
    ("log_params_norm", bool, "Megatron asserts that no expert is shared"),
    ("use_megatron_fsdp", bool, "FSDP shards the experts that replicas keep whole"),
    ("use_torch_fsdp2", bool, "FSDP shards the experts that replicas keep whole"),
    ("init_model_with_meta_device", bool, "initial weights are exchanged when the model is built"),
    ("fp8", bool, "copying fp8 weights between ranks is not supported yet"),
    ("fp4", bool, "copying fp4 weights between ranks is not supported yet"),
    ("cuda_graph_impl", lambda v: v not in (None, "none"), "counts go through the host"),
    (
        "num_distributed_optimizer_instances",
        lambda v: (v or 1) > 1,
        "gradients of experts would be sharded before replicas are summed",
    ),
    ("optimizer", lambda v: v not in ("adam", "sgd"), "only Adam's and SGD's state can be moved"),
)


def check(args: argparse.Namespace, config: ReplicaConfig) -> None:
    """Checks that a run can have the replicas that it asks for. Nothing is built yet.

    Raises:
        ConfigError: names the flag and what to do.
    """
    slots = config.slots_per_rank
    if not slots:
        return
    flag = f"--resilient-slots-per-rank {slots}"
    experts, ep = args.num_experts, args.expert_model_parallel_size
    if not experts:
        raise ConfigError(f"{flag}: the model has no experts; pass --num-experts")
    if slots * ep < experts:
        raise ConfigError(
            f"{flag}: {ep} expert-parallel ranks have {slots * ep} slots for {experts} experts; "
            f"pass at least {-(-experts // ep)}"
        )
    if slots > experts:
        raise ConfigError(
            f"{flag}: a rank has no use for a second slot of the same expert; pass at most "
            f"{experts}"
        )
    for name, in_the_way, why in _REFUSED:
        value = getattr(args, name, None)
        if in_the_way(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value} with {flag}: {why}")
    _check_distributed_optimizer(args, flag)
    _check_memory(args, config)


def _check_distributed_optimizer(args: argparse.Namespace, flag: str) -> None:
    if not args.use_distributed_optimizer:
        return
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    domain = expert_tp * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > domain:
        raise ConfigError(
            f"--use-distributed-optimizer with {flag}: experts would be sharded over "
            f"{world // domain} expert-parallel domains before replicas are summed; make "
            f"--expert-model-parallel-size {world // domain} times larger"
        )
    by_name = args.resilient_checkpoint_format == "experts"
    if (args.save or args.load) and not (by_name or args.dist_ckpt_optim_fully_reshardable):
        raise ConfigError(
            f"--use-distributed-optimizer with {flag}: its default checkpoint fits one placement "
            "only; add --dist-ckpt-optim-fully-reshardable or --resilient-checkpoint-format experts"
        )


def slot_bytes(args: argparse.Namespace) -> dict[str, int]:
    """Returns the bytes of one slot of one layer on a rank: weights, gradients, optimizer."""
    hidden = args.hidden_size
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ffn = (args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * hidden) // expert_tp
    width = 2 * ffn if args.swiglu else ffn
    elements = hidden * width + ffn * hidden
    if args.add_bias_linear:
        elements += width + hidden
    half = args.bf16 or args.fp16
    wide_gradients = not half or args.accumulate_allreduce_grads_in_fp32
    moments = 2 if args.optimizer == "adam" else 1
    return {
        "weights": elements * (2 if half else 4),
        "gradients": elements * (4 if wide_gradients else 2),
        "optimizer": elements * 4 * (moments + bool(half)),
    }


def moe_layers(args: argparse.Namespace) -> int:
    """Returns the MoE layers of the fullest pipeline stage."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        layers = -(-args.num_layers // frequency)
    else:
        layers = sum(map(bool, frequency))
    return -(-layers // args.pipeline_model_parallel_size)


def memory_table(args: argparse.Namespace, config: ReplicaConfig) -> list[str]:
    """Returns, line by line, what the slots cost a rank, with replicas and without."""
    parts = slot_bytes(args)
    layers = moe_layers(args)
    stock = -(-args.num_experts // args.expert_model_parallel_size)
    lines = [
        f"expert slots of a rank: {config.slots_per_rank} in {layers} MoE layers "
        f"(without replicas: {stock})"
    ]
    for name, size in (*parts.items(), ("together", sum(parts.values()))):
        with_replicas = size * layers * config.slots_per_rank / GIB
        without = size * layers * stock / GIB
        lines.append(f"  {name:<10} {with_replicas:9.3f} GiB  (without replicas {without:9.3f})")
    return lines


def _check_memory(args: argparse.Namespace, config: ReplicaConfig) -> None:
    if not config.max_expert_gib:
        return
    per_slot = sum(slot_bytes(args).values()) * moe_layers(args)
    fit = int(config.max_expert_gib * GIB // per_slot)
    if config.slots_per_rank > fit:
        raise ConfigError(
            f"--resilient-slots-per-rank {config.slots_per_rank} needs "
            f"{per_slot * config.slots_per_rank / GIB:.3f} GiB a rank, over "
            f"--resilient-max-expert-gib {config.max_expert_gib}: at most {fit} slots fit"
        )
