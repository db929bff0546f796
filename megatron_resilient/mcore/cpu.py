"""The CPU backend's flags: other defaults, and a refusal by name of what needs a GPU."""

import argparse
import os

from megatron_resilient.errors import ConfigError

# Megatron's defaults name things that need a GPU. On a CPU these are the defaults instead, so
# that a command line that says nothing about them runs.
DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_swiglu_fusion": False,
    "apply_rope_fusion": False,
    "num_workers": 0,
    "async_strategy": "mcore",
}

# (attribute, is it a request for a GPU?, what to write instead)
_REFUSED = (
    ("transformer_impl", lambda v: v != "local", "leave --transformer-impl out, or pass local"),
    ("distributed_backend", lambda v: v != "gloo", "leave --distributed-backend out, or pass gloo"),
    ("moe_grouped_gemm", bool, "drop --moe-grouped-gemm (it needs Transformer Engine)"),
    ("multi_latent_attention", bool, "drop it (its attention needs Transformer Engine)"),
    ("moe_token_dispatcher_type", lambda v: v == "flex", "use alltoall or allgather"),
    ("fp8", bool, "drop --fp8-format"),
    ("fp4", bool, "drop --fp4-format"),
    ("tp_comm_overlap", bool, "drop --tp-comm-overlap"),
    ("cuda_graph_impl", lambda v: v not in (None, "none"), "drop --cuda-graph-impl"),
    ("async_strategy", lambda v: v != "mcore", "leave --async-strategy out, or pass mcore"),
    ("use_megatron_fsdp", bool, "drop --use-megatron-fsdp"),
    ("use_torch_fsdp2", bool, "drop --use-torch-fsdp2"),
)


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Makes `parser` default to what runs on a CPU; what the user passes still wins."""
    from megatron.core.transformer.enums import AttnBackend

    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in DEFAULTS.items() if k in known})
    parser.set_defaults(attention_backend=AttnBackend.unfused)


def adapt(args: argparse.Namespace) -> None:
    """Refuses what needs a GPU and completes what a CPU does in another way.

    Raises:
        ConfigError: names the first flag that cannot work.
    """
    # It orders CUDA kernels, and Megatron demands it for TP > 1.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if args.async_save:
        # Megatron drops --async-save without this flag; here a forked writer serves both.
        args.use_persistent_ckpt_worker = True
    for name, needs_gpu, instead in _REFUSED:
        value = getattr(args, name, None)
        if needs_gpu(value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: not on the CPU backend; {instead}"
            )
