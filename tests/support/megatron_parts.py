"""Parts of Megatron that the CPU group patches, tried in a worker of a pool."""

import logging

import torch


def norms():
    """Returns what becomes of a norm with and without sequence parallelism, and in stock."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    found = {}
    for normalization in ("RMSNorm", "LayerNorm"):
        for is_parallel in (False, True):
            config = TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                normalization=normalization,
                persist_layer_norm=False,
                tensor_model_parallel_size=2,
                sequence_parallel=is_parallel,
                apply_rope_fusion=False,
            )
            norm = WrappedTorchNorm(config, 8)
            marks = [getattr(p, "sequence_parallel", False) for p in norm.parameters()]
            output = norm(torch.arange(8.0)[None])
            try:
                WrappedTorchNorm.__new__.__wrapped__(WrappedTorchNorm, config, 8)
                stock = "builds"
            except AssertionError:
                stock = "refuses"
            found[f"{normalization} {is_parallel}"] = {
                "marks": marks,
                "class": type(norm).__name__,
                "mean of squares": round(float(output.pow(2).mean()), 3),
                "stock": stock,
                "config": config.sequence_parallel,
            }
    return found


class _Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def rng_fork():
    """Draws inside and outside of a forked stream; returns the numbers and the warnings."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    heard = _Heard()
    logger.addHandler(heard)
    try:
        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("stream", 7)
        inside = []
        for _ in range(2):
            with tracker.fork("stream"):
                inside += torch.rand(2).tolist()
        outside = torch.rand(2).tolist()
        quiet = list(heard.messages)
        stock = CudaRNGStatesTracker.fork.__wrapped__.__wrapped__
        with stock(tracker, "stream"):
            torch.rand(1)
        logger.warning("still heard")
        return {
            "inside": inside,
            "outside": outside,
            "ours": quiet,
            "stock": heard.messages,
        }
    finally:
        logger.removeHandler(heard)


def startup_timestamps():
    """Returns what is left of the start times of earlier runs in this process."""
    from megatron.training import training

    return training._STARTUP_TIMESTAMPS["program_start"]
